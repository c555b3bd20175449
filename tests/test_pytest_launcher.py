"""The launcher: pytest as `python -m pytest` runs it, nothing of the repository before it, and a true report."""

import ast
import inspect
import json
import subprocess
from pathlib import Path

import pytest

from agent_r3.envs import pytest_launcher
from agent_r3.envs.canaries import make_canaries
from agent_r3.envs.signed_report import UnfairError, read_report, statuses
from tests.support.launched import COMMAND, Launched, launch, write_files

_LOOK = """
import json, os, sys
def test_look():
    main = sys.modules["__main__"]
    json.dump({
        "path": sys.path, "argv": sys.argv,
        "main": [main.__name__, main.__file__, main.__spec__.name, main.__package__],
        "environ": {k: v for k, v in os.environ.items() if k not in ("_", "SHLVL", "PYTEST_VERSION")},
        "flags": str(sys.flags), "warnings": sys.warnoptions, "stdin": os.read(0, 10).decode(), "cwd": os.getcwd(),
    }, open("seen.json", "w"))
"""
_EVERY_KIND = """
import unittest
import pytest

@pytest.fixture
def broken():
    raise ValueError("no fixture - at all")

@pytest.fixture
def broken_after():
    yield
    raise ValueError

def test_good(): pass
def test_bad(): assert "PASSED" == "ERROR"
def test_no_setup(broken): pass
def test_no_teardown(broken_after): pass
def test_bad_no_teardown(broken_after): assert 0
def test_skipped(): pytest.skip("why")
@pytest.mark.xfail
def test_expected(): assert 0
@pytest.mark.xfail
def test_unexpected(): pass
@pytest.mark.xfail(strict=True)
def test_strict(): pass
@pytest.mark.parametrize("p", ["a b", "a - b", "c - d", "::1", "12:30:05", "\\x1b[31mred", "ü"])
def test_named(p): pass
class TestPlain:
    def test_in(self): pass
class TestCase(unittest.TestCase):
    def test_unit(self): self.assertEqual(1, 2)
    def test_sub(self):
        for i in range(2):
            with self.subTest(i=i): pass
"""


def _found(run: Launched) -> dict[str, str]:
    return statuses(read_report(run.report, run.key, run.exit_status).records)


def test_the_tests_see_what_python_m_pytest_shows_them(tmp_path: Path) -> None:
    write_files(tmp_path / "repo", {"test_look.py": _LOOK, "src/empty.txt": ""})
    command = f"{COMMAND} -q test_look.py"
    subprocess.run(
        ["bash", "-c", command], cwd=tmp_path / "repo", check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    bare = json.loads((tmp_path / "repo/seen.json").read_text())
    ours = launch(tmp_path / "repo", {}, f"PATH=/usr/bin:/bin {command}")
    assert ours.exit_status == 0, ours.output
    assert json.loads((tmp_path / "repo/seen.json").read_text()) == bare
    assert not list(tmp_path.glob("launcher-*")), "the launcher can still be read"


@pytest.mark.parametrize(
    "name", ["sitecustomize.py", "pytest.py", "pluggy.py", "json.py", "hashlib.py", "unittest/__init__.py", "shutil.py"]
)
def test_nothing_of_the_repository_stands_in_for_pytest_or_what_it_is_made_of(tmp_path: Path, name: str) -> None:
    files = {name: "import os\nos._exit(0)\n", "test_a.py": "def test_a():\n    assert 0\n"}
    assert _found(launch(tmp_path / "repo", files, f"{COMMAND} test_a.py")) == {"test_a": "FAILED"}


def test_every_kind_of_outcome_has_the_status_and_the_name_of_pytests_own_summary(tmp_path: Path) -> None:
    run = launch(tmp_path / "repo", {"test_a.py": _EVERY_KIND}, f"{COMMAND} -rA --color=no test_a.py")
    assert run.exit_status == 1
    found = _found(run)
    assert found == {
        "test_good": "PASSED",
        "test_bad": "FAILED",
        "test_no_setup": "ERROR",
        "test_no_teardown": "ERROR",
        "test_bad_no_teardown": "FAILED",
        "test_strict": "FAILED",
        "test_named[a b]": "PASSED",
        "test_named[a": "PASSED",
        "test_named[c": "PASSED",
        "test_named[.1]": "PASSED",
        "test_named[12:30:05]": "PASSED",
        "test_named[\\x1b[31mred]": "PASSED",
        "test_named[\\xfc]": "PASSED",
        "TestPlain.test_in": "PASSED",
        "TestCase.test_unit": "FAILED",
        "TestCase.test_sub": "PASSED",
    }
    summary = run.output.split("short test summary info")[1].splitlines()[1:-1]
    words = {line.split(" ", 1)[0] for line in summary}
    assert words >= {"PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"}


def test_a_file_that_cannot_be_collected_has_the_empty_name_and_no_test_runs(tmp_path: Path) -> None:
    files = {"test_a.py": "import nothing_such\n", "test_b.py": "def test_b(): pass\n"}
    run = launch(tmp_path / "repo", files)
    report = read_report(run.report, run.key, run.exit_status)
    assert (report.exit_status, report.interrupted, statuses(report.records)) == (2, True, {"": "ERROR"})


def test_a_fork_of_the_tests_process_reports_nothing(tmp_path: Path) -> None:
    code = "import os\ndef test_a():\n    if os.fork() == 0:\n        return\n    os.wait()\ndef test_b(): pass\n"
    assert _found(launch(tmp_path / "repo", {"test_a.py": code})) == {"test_a": "PASSED", "test_b": "PASSED"}


def test_no_exit_handler_of_the_repository_changes_the_exit_status(tmp_path: Path) -> None:
    code = "import atexit, os, sys\natexit.register(os._exit, 0)\nos._exit = sys.exit = lambda code: None\n"
    run = launch(tmp_path / "repo", {"test_a.py": code + "def test_a(): assert 0\n"})
    assert (run.exit_status, _found(run)) == (1, {"test_a": "FAILED"})


def test_other_processes_neither_inherit_the_report_nor_reach_into_the_tests_process(tmp_path: Path) -> None:
    code = """
import ctypes, os, subprocess, sys
def test_a():
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0
    listing = subprocess.run(["ls", "/proc/self/fd"], close_fds=False, stdout=subprocess.PIPE).stdout.split()
    assert max(map(int, listing)) < 200
    try:
        os.write(3, b"x")
    except OSError:
        pass
"""
    assert _found(launch(tmp_path / "repo", {"test_a.py": code})) == {"test_a": "PASSED"}


def test_the_key_is_in_no_object_of_the_process(tmp_path: Path) -> None:
    code = """
import gc, sys
def test_a():
    frame, found = sys._getframe(), list(gc.get_objects())
    while frame:
        found += frame.f_locals.values()
        frame = frame.f_back
    cells = [c.cell_contents for f in found if callable(f) for c in getattr(f, "__closure__", None) or () if c]
    small = [bytes(o) for o in found + cells if isinstance(o, (bytes, bytearray)) and 32 <= len(o) <= 64 and any(o)]
    with open("bytes.txt", "w") as file:
        file.writelines(o.hex() + "\\n" for o in small)
"""
    run = launch(tmp_path / "repo", {"test_a.py": code})
    assert _found(run) == {"test_a": "PASSED"}
    assert run.key.hex() not in (tmp_path / "repo/bytes.txt").read_text()


def test_a_function_of_pytest_or_unittest_that_is_replaced_is_named(tmp_path: Path) -> None:
    for code in (
        "import unittest\nunittest.TestCase.assertIn = print\ndef test_a(): pass\n",
        "import unittest\nf = lambda *a: 0\nunittest.TestCase.fail.__code__ = f.__code__\ndef test_a(): pass\n",
    ):
        run = launch(tmp_path / "repo", {"test_a.py": code})
        with pytest.raises(UnfairError, match=r"the run changed unittest\.case\.TestCase\.(assertIn|fail)$"):
            read_report(run.report, run.key, run.exit_status)


def test_canaries_come_out_as_they_must(tmp_path: Path) -> None:
    canaries = make_canaries(["test_1.py", "util.py"])
    run = launch(tmp_path / "repo", {canaries.file: canaries.source, "test_1.py": "def test_a(): pass\n"})
    report = read_report(run.report, run.key, run.exit_status)
    own = [record for record in report.records if canaries.holds(record)]
    assert canaries.problem(own) is None
    assert statuses(record for record in report.records if record not in own) == {"test_a": "PASSED"}
    missing = [record for record in own if record.when != "call"]
    assert "missing instead of" in (canaries.problem(missing) or "")


def test_the_launcher_is_a_program_for_python_3_6() -> None:
    ast.parse(inspect.getsource(pytest_launcher), feature_version=(3, 6))

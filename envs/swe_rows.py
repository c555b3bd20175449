"""Rows of SWE-bench and SWE-smith -> Task. Pure.

Their images hold the repository in /testbed and its environment as conda's `testbed`. A SWE-bench image stands at the
buggy commit, and such a task is graded by SWE-bench's own harness (swe_grading.py), which wants columns that older rows
lack: those are still tasks for an agent. A SWE-smith image, one for all bugs of a repository, stands at a sound commit:
the row's `patch` puts the bug in, and undoing it is the gold patch.

Departures from SWE-smith's harness: the bug is put in by its patch instead of a branch fetched from the network; the
files of the tests that must come to pass are taken out of the agent's repository; all tests that the row names are
run, not those of these files only.
"""

import shlex
from collections.abc import Iterable

from agent_r3.envs.columns import Origin, Row, names, optional_text, parsed, short, text
from agent_r3.envs.reverse import UnreversibleError, reversed_patch
from agent_r3.types import Source, Task

_HARNESS_TEXTS = ("version", "log_parser", "eval_type", "eval_script")  # for the harness alone
BENCH_COLUMNS = (
    *("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement"),
    *("FAIL_TO_PASS", "PASS_TO_PASS", "image", *_HARNESS_TEXTS, "image_assets", "difficulty"),
)
SMITH_COLUMNS = ("instance_id", "repo", "patch", "image_name", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")

_PYTHON = "/opt/miniconda3/envs/testbed/bin/python"
_LARGEST_COMMAND = 100_000  # characters: Linux takes 128 KiB in one argument


def bench_task(row: Row, origin: Origin) -> Task:
    """Raises DataError for a missing or malformed column."""
    task_id = text(row, "instance_id", origin)
    for column in ("base_commit", "test_patch"):
        text(row, column, origin)
    image = optional_text(row, "image", origin)
    image = image or f"swebench/sweb.eval.x86_64.{_in_image_name(task_id)}:latest"
    return Task(
        id=task_id,
        dataset=origin.dataset,
        repo=text(row, "repo", origin),
        image=image,
        problem_statement=text(row, "problem_statement", origin).strip(),
        expected=_expected(row, origin),
        test_command="",
        gold_patch=text(row, "patch", origin),
        source=Source.SWE_BENCH,
        harness_row=_harness_row(row, image, origin),
        difficulty=optional_text(row, "difficulty", origin) or "",
    )


def smith_task(row: Row, origin: Origin) -> Task:
    """Raises DataError for a missing or malformed column."""
    bug = text(row, "patch", origin)
    failing = names(row, "FAIL_TO_PASS", origin)
    expected = _expected(row, origin)
    owner, _, image = text(row, "image_name", origin).rpartition("/")
    return Task(
        id=text(row, "instance_id", origin),
        dataset=origin.dataset,
        repo=text(row, "repo", origin),
        image=f"{owner or 'jyangballin'}/{_in_image_name(image)}",
        problem_statement=text(row, "problem_statement", origin).strip(),
        expected=expected,
        test_command=_pytest(_files(expected, origin), origin),
        gold_patch=_undone(bug, origin),
        source=Source.SWE_SMITH,
        bug_patch=bug,
        test_files=_files(failing, origin),
        other_tests=True,
    )


def _harness_row(row: Row, image: str, origin: Origin) -> dict[str, object]:
    """What `swebench.harness.utils.make_test_spec` reads, as far as the row has it."""
    found: dict[str, object] = {column: text(row, column, origin) for column in ("instance_id", "repo")}
    found["image"] = image
    found |= {column: list(names(row, column, origin)) for column in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    found |= {column: said for column in _HARNESS_TEXTS if (said := optional_text(row, column, origin)) is not None}
    if row.get("image_assets"):
        assets = row["image_assets"]
        assets = parsed(assets, "image_assets", origin) if isinstance(assets, str) else assets
        if not isinstance(assets, dict):
            raise origin.error("image_assets", f"must be an object, found {short(assets)}")
        found |= {"image_assets": assets} if assets else {}
    return found


def _in_image_name(name: str) -> str:
    return name.replace("__", "_1776_").lower()


def _expected(row: Row, origin: Origin) -> dict[str, str]:
    failing = names(row, "FAIL_TO_PASS", origin)
    if not failing:
        raise origin.error("FAIL_TO_PASS", "names no test")
    return dict.fromkeys((*failing, *names(row, "PASS_TO_PASS", origin)), "PASSED")


def _files(tests: Iterable[str], origin: Origin) -> tuple[str, ...]:
    """The files of pytest's node ids, each once."""
    files: dict[str, None] = {}
    for test in tests:
        file, separator, _ = test.partition("::")
        if not separator or file.startswith("/") or ".." in file.split("/"):
            problem = f"and PASS_TO_PASS must hold ids such as tests/test_a.py::test_b, not {short(test)}"
            raise origin.error("FAIL_TO_PASS", problem)
        files[file] = None
    return tuple(files)


def _pytest(files: tuple[str, ...], origin: Origin) -> str:
    command = f"{_PYTHON} -m pytest --disable-warnings --color=no {shlex.join(sorted(files))}"
    if len(command) > _LARGEST_COMMAND:
        raise origin.error("PASS_TO_PASS", f"names {len(files)} files, too many for one command")
    return command


def _undone(bug: str, origin: Origin) -> str:
    try:
        return reversed_patch(bug)
    except UnreversibleError as exc:
        raise origin.error("patch", f"is not a diff of text files: {exc}") from exc

"""The folders are fixed, the package is one: links, wheel, editable install and the ban on bare imports agree."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import agent_r3

ROOT = Path(__file__).parent.parent
FOLDERS = ("envs", "tools", "rollout", "trainer", "eval")


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_is_seen_inside_the_package_through_a_relative_link(folder: str) -> None:
    link = ROOT / "agent_r3" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
    assert (link / "__init__.py").is_file()


def test_the_editable_install_is_this_checkout() -> None:
    assert Path(agent_r3.__file__).resolve().parent == ROOT / "agent_r3"


def test_the_wheel_holds_every_module_once_and_no_tests(tmp_path: Path) -> None:
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools packs what an earlier build left there
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("agent_r3/")]
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "agent_r3", *FOLDERS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    wanted = {path for path in tracked if not (ROOT / path).is_symlink() and (ROOT / path).is_file()}
    expected = {path if path.startswith("agent_r3/") else f"agent_r3/{path}" for path in wanted}
    assert sorted(packed) == sorted(expected)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_bare_import_of_a_folder_is_refused(folder: str) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", "tests/x.py", "-"],
        input=f"import {folder}\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TID251" in checked.stdout


@pytest.mark.parametrize("module", ["rollout.service", "rollout.engine_service", "eval.run", "tiny"])
def test_roles_behind_a_broker_need_no_docker_package_and_no_endpoints_client(module: str) -> None:
    code = f"import sys; sys.modules['docker'] = sys.modules['openai'] = None; import agent_r3.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

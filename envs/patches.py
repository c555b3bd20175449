"""What a patch may change, and how it gets into a fresh repository: strictly, or not at all.

Left out are tests and whatever decides which tests run, how, and by what: their configuration, CI, start-up hooks of
the interpreter, its environment, installed metadata (through which pytest finds plugins), compiled modules, and git's
own files. A file of configuration is left out whole, also where it holds more than that of the tests.
"""

import re
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath

from agent_r3.envs.commits import is_test_file
from agent_r3.envs.sandbox import Sandbox
from agent_r3.envs.workdir import OWN_GIT
from agent_r3.errors import GradingError
from agent_r3.types import Outcome, Task

TESTS = "r2e_tests"  # where the hidden tests stand in the workdir

_TIMEOUT_S = 120.0
_MOST_EXCLUDED = 1 << 20  # bytes of patterns, which git gets as its arguments
_NAMES_BYTES = 16 << 20

# Names of files and folders, wherever they stand in the path.
_PROTECTED = frozenset(
    {
        *(TESTS, "run_tests.sh", "conftest.py", "noxfile.py"),
        *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
        *(".venv", "__pycache__", "pyvenv.cfg"),
        *(".circleci", ".buildkite", ".travis.yml", ".appveyor.yml", "appveyor.yml", "azure-pipelines.yml"),
        *(".cirrus.yml", "Jenkinsfile", ".pre-commit-config.yaml"),
    }
)
_STARTUP_HOOKS = frozenset({"sitecustomize", "usercustomize"})
_ENDINGS = (".pth", ".pyc", ".egg-info", ".dist-info", ".egg-link")
_APPLY = """options=(--whitespace=nowarn)
while IFS= read -r -d '' pattern; do options+=("--exclude=$pattern"); done <{folder}/left_out
ours apply "${{options[@]}}" {folder}/patch"""
_GLOB = re.compile(r"[\\\\*?\[]")


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a patch. `refused` says why nothing was applied, None when it was."""

    left_out: tuple[str, ...] = ()
    refused: str | None = None
    outcome: Outcome = "unapplied"  # where it was refused


def protected(path: str) -> bool:
    """Whether no patch may change, make or delete this file. `path` is relative to the repository, as in a patch."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or parts[0] == "venv":
        return True
    return is_test_file(path) or any(
        part in _PROTECTED
        or part.startswith(".git")
        or part.endswith(_ENDINGS)
        or part.partition(".")[0] in _STARTUP_HOOKS
        for part in parts
    )


async def apply_patch(sandbox: Sandbox, task: Task, patch: bytes) -> Applied:
    """Apply what `patch` may change to the fresh repository, all of it or nothing.

    Raises SandboxError, GradingError when git does not run as it should.
    """
    if not patch.strip():
        return Applied()
    folder = scratch_folder()
    await sandbox.put(f"{folder}/patch", patch)
    # The new names of the patch's files, then as many old ones.
    listing = f"ours apply --numstat -z {folder}/patch >&3; ours apply --numstat -z -R {folder}/patch >&3"
    complaint, listed = await _git(sandbox, task, listing, _NAMES_BYTES)
    if complaint is not None:
        return Applied(refused=complaint)
    if len(listed) > _NAMES_BYTES:
        return Applied(refused=f"the names of its files have more than {_NAMES_BYTES} bytes", outcome="too_large")
    new, old = numstat_names(listed)
    keep_out = sorted(name for name in new if protected(name) or name in task.test_files)
    left_out = tuple(_printable(name) for name in keep_out)
    # Sources of renames, which --exclude does not look at. Our own diffs have none.
    if moved := [name for name in old - new if protected(name) or name in task.test_files]:
        return Applied(left_out, f"it renames or copies {_printable(min(moved))}, which no patch may change")
    patterns = b"".join(escaped(name).encode(errors="surrogateescape") + b"\0" for name in keep_out)
    if len(patterns) > _MOST_EXCLUDED:
        return Applied(left_out[:20], f"it changes {len(left_out)} files that no patch may change", "too_large")
    await sandbox.put(f"{folder}/left_out", patterns)
    complaint = None
    if len(keep_out) < len(new):
        complaint, _ = await _git(sandbox, task, _APPLY.format(folder=folder))
    return Applied(left_out, complaint)


def numstat_names(listed: bytes) -> tuple[Counter[str], Counter[str]]:
    """The new names and the old names of all files, from `git apply --numstat -z` and then the same with `-R`."""
    names = [entry.split(b"\t", 2)[2].decode(errors="surrogateescape") for entry in listed.split(b"\0")[:-1]]
    half = len(names) // 2
    return Counter(names[:half]), Counter(names[half:])


def escaped(path: str) -> str:
    """The pattern of `git apply --exclude` that matches this path only."""
    return _GLOB.sub(r"\\\g<0>", path)


def _printable(path: str) -> str:
    return path.encode(errors="surrogateescape").decode(errors="replace")


def scratch_folder() -> str:
    """A place in the container, outside the repository, whose name nobody knows beforehand."""
    return f"/var/tmp/agent-r3/{secrets.token_hex(16)}"


async def _git(sandbox: Sandbox, task: Task, script: str, report_bytes: int = 0) -> tuple[str | None, bytes]:
    """git's complaint, or None, and what the script reports."""
    result = await sandbox.exec(
        f"set -eu\n{OWN_GIT}{script}", timeout_s=_TIMEOUT_S, cwd=task.workdir, max_report_bytes=report_bytes
    )
    if result.exit_code == 0:
        return None, result.report
    complaint = " ".join(result.text.split())[-300:]
    if result.exit_code not in (1, 128):  # git's codes for a patch it refuses
        raise GradingError(f"grade {task.id}: git apply ended with {result.exit_code}: {complaint}")
    return complaint, b""

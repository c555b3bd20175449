"""One run of a task's hidden tests in a fresh container: patch, then tests, then pytest."""

import io
import secrets
import tarfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_r3.envs.sandbox import FileMissingError, Sandbox
from agent_r3.envs.summary import parse_summary
from agent_r3.errors import GradingError
from agent_r3.types import Task

TESTS = "r2e_tests"
_STEP_TIMEOUT_S = 120.0
_OUTPUT_BYTES = 16 << 20  # head and tail of the log are kept: the summary stands at the end


@dataclass(frozen=True, slots=True)
class PytestRun:
    """What pytest did. `unapplied` is git's complaint when the patch did not apply; then nothing was run."""

    statuses: Mapping[str, str]
    exit_code: int
    timed_out: bool
    reported_bad: int | None  # failures and errors in pytest's own report; None when it wrote none
    output: str
    seconds: float
    unapplied: str | None = None


async def run_hidden_tests(sandbox: Sandbox, task: Task, patch: bytes, timeout_s: float) -> PytestRun:
    """Apply `patch` to the fresh repository, put the hidden tests in, run them.

    Raises SandboxError from the sandbox, GradingError when a step of ours fails.
    """
    started = time.perf_counter()
    if patch.strip() and (complaint := await _apply(sandbox, task, patch)) is not None:
        return PytestRun({}, 1, False, None, complaint, time.perf_counter() - started, unapplied=complaint)
    await _put_tests(sandbox, task)
    report = f"/tmp/{secrets.token_hex(16)}.xml"
    result = await sandbox.exec(
        f'export PYTEST_ADDOPTS="$PYTEST_ADDOPTS --junitxml={report}"; {task.test_command}',
        timeout_s=timeout_s,
        cwd=task.workdir,
        max_output_bytes=_OUTPUT_BYTES,
    )
    return PytestRun(
        statuses=parse_summary(result.text),
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        reported_bad=None if result.timed_out else await _reported_bad(sandbox, report),
        output=result.text,
        seconds=time.perf_counter() - started,
    )


async def _apply(sandbox: Sandbox, task: Task, patch: bytes) -> str | None:
    """git's complaint, or None. Changes to the place of the hidden tests are left out: they would be overwritten."""
    await sandbox.put("/tmp/agent.patch", patch)
    result = await sandbox.exec(
        "git -c safe.directory='*' apply --whitespace=nowarn "
        f"--exclude='{TESTS}' --exclude='{TESTS}/*' /tmp/agent.patch",
        timeout_s=_STEP_TIMEOUT_S,
        cwd=task.workdir,
    )
    if result.exit_code == 0:
        return None
    if result.exit_code not in (1, 128):  # git's codes for a patch it refuses
        raise GradingError(f"grade {task.id}: git apply ended with {result.exit_code}: {_end(result.text)}")
    return _end(result.text)


async def _put_tests(sandbox: Sandbox, task: Task) -> None:
    if task.hidden_tests_dir is None:
        bring = f"cp -r /{TESTS} {TESTS}"
    else:
        await sandbox.put("/tmp/hidden_tests.tar", _packed(task.hidden_tests_dir))
        bring = f"mkdir {TESTS} && tar -xf /tmp/hidden_tests.tar -C {TESTS} && rm /tmp/hidden_tests.tar"
    result = await sandbox.exec(f"rm -rf {TESTS} && {bring}", timeout_s=_STEP_TIMEOUT_S, cwd=task.workdir)
    if result.exit_code != 0:
        raise GradingError(
            f"grade {task.id}: put the hidden tests in: exit status {result.exit_code}: {_end(result.text)}"
        )


async def _reported_bad(sandbox: Sandbox, report: str) -> int | None:
    """Failures and errors as pytest's JUnit report counts them: a process that ends itself early leaves no report."""
    try:
        root = ET.fromstring(await sandbox.get(report))
    except (FileMissingError, OSError, ET.ParseError):
        return None
    return sum(int(suite.get(kind, 0)) for suite in root.iter("testsuite") for kind in ("failures", "errors"))


def _packed(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name, filter=_as_root)
    return buffer.getvalue()


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry


def _end(text: str) -> str:
    return " ".join(text.split())[-300:]

"""One run of a task's hidden tests in a fresh container: patch, then tests, then pytest under our launcher."""

import hashlib
import io
import json
import secrets
import shlex
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_r3.envs import pytest_launcher
from agent_r3.envs.canaries import Canaries, make_canaries
from agent_r3.envs.patches import TESTS as TESTS
from agent_r3.envs.patches import apply_patch, scratch_folder
from agent_r3.envs.pytest_command import PytestCommand, UnknownCommandError, parse_command
from agent_r3.envs.sandbox import ExecResult, FileMissingError, Sandbox
from agent_r3.envs.signed_report import NotBegunError, Report, UnfairError, read_report, statuses
from agent_r3.envs.whole_patch import apply_whole
from agent_r3.errors import DataError, GradingError
from agent_r3.types import Outcome, Task

_STEP_TIMEOUT_S = 120.0
_OUTPUT_BYTES = 1 << 20  # for people; nothing is read from it
_REPORT_BYTES = 64 << 20
_LISTING_BYTES = 16 << 20
_LARGEST_TEST_FILE = 64 << 20
_LAUNCHER = Path(pytest_launcher.__file__).read_bytes()

# Tools of the system before any that stand on PATH for the task: those may lie in the repository.
_OWN_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH"

# A plain file stands where Python and pytest would keep compiled modules: what runs is what stands in the source.
# Reported are the names of the top-level modules, "--", and then the hash of every file.
_SETTLE = f"""
find {TESTS} -name __pycache__ -prune -exec rm -rf {{}} +
{{ echo {TESTS}; find {TESTS} -type f -name '*.py' -printf '%h\\n'; }} | sort -u | while IFS= read -r folder; do
    : >"$folder/__pycache__"
done
find {TESTS} -maxdepth 1 -type f -name '*.py' -printf '%f\\0' >&3
printf -- '--\\0' >&3
"""
_HASH = "find {places} -type f -print0 | xargs -0 sha256sum -z -- >&3\n"


@dataclass(frozen=True, slots=True)
class HiddenRun:
    """What came of the hidden tests. `outcome` is None where they ran to the end and `statuses` are the verdict."""

    statuses: Mapping[str, str]
    exit_code: int
    output: str
    seconds: float
    outcome: Outcome | None = None
    problem: str = ""  # why it is no verdict
    left_out: tuple[str, ...] = ()


async def run_hidden_tests(sandbox: Sandbox, task: Task, patch: bytes, timeout_s: float) -> HiddenRun:
    """Apply `patch` to the fresh repository, put the hidden tests in, run them.

    Raises DataError for a test command of another form, SandboxError from the sandbox, GradingError when a step of
    ours fails.
    """
    started = time.perf_counter()
    command = command_of(task)
    if task.bug_patch and (complaint := await apply_whole(sandbox, task, task.bug_patch.encode())) is not None:
        raise DataError(f"task {task.id}: its bug does not apply to image {task.image}: {complaint}")
    applied = await apply_patch(sandbox, task, patch)
    if applied.refused is not None:
        took = time.perf_counter() - started
        return HiddenRun({}, 1, "", took, applied.outcome, applied.refused, applied.left_out)
    names, hashes = await _put_tests(sandbox, task)
    canaries = make_canaries(names)
    source = canaries.source.encode()
    await sandbox.put(f"{task.workdir}/{TESTS}/{canaries.file}", source)
    hashes[f"{TESTS}/{canaries.file}"] = hashlib.sha256(source).hexdigest()
    key = secrets.token_bytes(pytest_launcher.KEY_BYTES)
    result = await _launch(sandbox, task, command, canaries, key, timeout_s)
    verdict: Mapping[str, str] = {}
    outcome: Outcome | None = None
    problem = ""
    try:
        report = _read(task, result, key, timeout_s)
        _check_canaries(canaries, report)
        await _check_unchanged(sandbox, task, hashes)
        verdict = statuses((r for r in report.records if not canaries.holds(r)), whole_ids=task.other_tests)
    except UnfairError as exc:
        outcome, problem = exc.outcome, str(exc)
    return HiddenRun(
        verdict, result.exit_code, result.text, time.perf_counter() - started, outcome, problem, applied.left_out
    )


def command_of(task: Task) -> PytestCommand:
    """The parts of the task's test command. Raises DataError for one of another form."""
    try:
        return parse_command(task.test_command)
    except UnknownCommandError as exc:
        raise DataError(
            f"task {task.id}: its test command is not of the form `[VAR=value ...] [xvfb-run options] python [options] "
            f"-m pytest arguments`: {exc}"
        ) from exc


async def _put_tests(sandbox: Sandbox, task: Task) -> tuple[list[str], dict[str, str]]:
    """Put the hidden tests in. Returns the names of their top-level modules, and {path in the workdir: SHA-256}."""
    if task.hidden_tests_dir is not None:
        archive = f"{scratch_folder()}.tar"
        await sandbox.put(archive, pack_tests(task.hidden_tests_dir))
        bring = f"mkdir {TESTS}; tar -xf {archive} -C {TESTS}; rm {archive}"
    elif task.test_files:
        bring = f"mkdir {TESTS}"  # they are the repository's own, and no patch changes them
    else:
        bring = f"cp -r /{TESTS} {TESTS}"
    places = shlex.join([TESTS, *task.test_files])
    result = await sandbox.exec(
        f"set -euo pipefail; {_OWN_PATH}; rm -rf {TESTS}; {bring}\n{_SETTLE}{_HASH.format(places=places)}",
        timeout_s=_STEP_TIMEOUT_S,
        cwd=task.workdir,
        max_report_bytes=_LISTING_BYTES,
    )
    if result.exit_code != 0:
        said = " ".join(result.text.split())[-300:]
        raise GradingError(f"grade {task.id}: put the hidden tests in: exit status {result.exit_code}: {said}")
    entries = [entry.decode(errors="surrogateescape") for entry in result.report.split(b"\0")[:-1]]
    border = entries.index("--")
    hashes = {path: digest for digest, path in (entry.split("  ", 1) for entry in entries[border + 1 :])}
    return entries[:border], hashes


async def _launch(
    sandbox: Sandbox, task: Task, command: PytestCommand, canaries: Canaries, key: bytes, timeout_s: float
) -> ExecResult:
    launcher = f"{scratch_folder()}/launcher.py"
    await sandbox.put(launcher, _LAUNCHER)
    arguments = list(command.arguments)
    if not any(argument.rstrip("/") == TESTS for argument in arguments):
        arguments.append(f"{TESTS}/{canaries.file}")
    return await sandbox.exec(
        command.launch(launcher),
        timeout_s=timeout_s,
        cwd=task.workdir,
        max_output_bytes=_OUTPUT_BYTES,
        stdin=key + json.dumps({"arguments": arguments}).encode(),
        max_report_bytes=_REPORT_BYTES,
    )


def _read(task: Task, result: ExecResult, key: bytes, timeout_s: float) -> Report:
    """Raises UnfairError; GradingError where the tests' process failed before anything of the repository could run."""
    if len(result.report) > _REPORT_BYTES:
        raise UnfairError("tampered", f"the report has more than {_REPORT_BYTES} bytes")
    if result.timed_out and result.report:
        raise UnfairError("timeout", f"exit status {result.exit_code}: timed out after {timeout_s:g} s")
    try:
        return read_report(result.report, key, result.exit_code)
    except NotBegunError:
        said = " ".join(result.text.split())[-300:]
        raise GradingError(
            f"grade {task.id}: pytest did not start in {result.seconds:.1f} s, exit status {result.exit_code}: {said}"
        ) from None


def _check_canaries(canaries: Canaries, report: Report) -> None:
    """Raises UnfairError when a test that must fail did not, or pytest gave up or did not notice."""
    if report.exit_status not in (0, 1) and not report.interrupted:
        raise UnfairError("failed", f"pytest gave up with exit status {report.exit_status}")
    own = [record for record in report.records if canaries.holds(record)]
    if report.interrupted and not own:
        return  # a file could not be collected, so that no test was run
    if problem := canaries.problem(own):
        raise UnfairError("tampered", problem)
    if report.exit_status != 1:
        raise UnfairError("tampered", f"exit status {report.exit_status} though tests failed")


async def _check_unchanged(sandbox: Sandbox, task: Task, hashes: Mapping[str, str]) -> None:
    """Raises UnfairError when a file of the hidden tests is not what was put there."""
    for path, digest in hashes.items():
        try:
            data = await sandbox.get(f"{task.workdir}/{path}", max_bytes=_LARGEST_TEST_FILE)
        except (FileMissingError, OSError) as exc:
            raise UnfairError("tampered", f"the run removed the hidden tests' {path}: {exc}") from exc
        if hashlib.sha256(data).hexdigest() != digest:
            raise UnfairError("tampered", f"the run changed the hidden tests' {path}")


def pack_tests(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name, filter=_as_root)
    return buffer.getvalue()


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry

"""SWE-bench's own grading in one of our sandboxes: its ways to apply a patch, its eval script, its reading of the log.

The steps are those of swebench 5.0.2, `harness/run_evaluation.py run_instance`, with its own constants and functions.
Departures: an empty patch is run like its `--no-patch`; output that is too long to be kept whole is not judged; how the
container differs is told in docs/tasks.md.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from agent_r3.envs.sandbox import ExecResult, Sandbox
from agent_r3.envs.signed_report import difference
from agent_r3.envs.swe_harness import UnreadableError, load_harness, report_of, spec_of, why_unread
from agent_r3.errors import GradingError
from agent_r3.types import Grade, Outcome, Task

_STEP_TIMEOUT_S = 300.0
_LARGEST_LOG = 64 << 20  # bytes
_SHOWN = 3
_NONE: Mapping[str, str] = MappingProxyType({})

Acquire = Callable[[], Awaitable[Sandbox]]


async def grade_swe_bench(acquire: Acquire, task: Task, patch: bytes, timeout_s: float) -> Grade:
    """swebench's verdict on `patch`: 1 if it calls the task resolved. `acquire` gives a fresh sandbox for grading.

    Raises DataError for a row that cannot be graded, UserError without swebench, SandboxError from the sandbox,
    GradingError when a step of ours fails.
    """
    started = time.perf_counter()
    spec = await asyncio.to_thread(spec_of, task)

    def grade(outcome: Outcome, reason: str, log: bytes, statuses: Mapping[str, str] = _NONE) -> Grade:
        seconds = time.perf_counter() - started
        return Grade(float(outcome == "passed"), dict(statuses), reason, seconds, outcome=outcome, log=log)

    sandbox = await acquire()
    try:
        if patch.strip():
            complaint, said = await _apply(sandbox, task, patch)
            if complaint is not None:
                return grade("unapplied", f"the patch does not apply: {complaint}", said)
        result = await _run(sandbox, task, spec.eval_script, timeout_s)
    finally:
        await sandbox.close()
    text = result.text
    if result.truncated:
        reason = f"the tests printed {result.total_bytes} bytes, at most {_LARGEST_LOG} are judged"
        return grade("too_large", reason, text.encode())
    if result.timed_out:
        text += f"\n\nTimeout error: {timeout_s:g} seconds exceeded."
        return grade("timeout", f"timed out after {timeout_s:g} s", text.encode())
    outcome, reason, statuses = await asyncio.to_thread(_judge, spec, task, text)
    return grade(outcome, reason, text.encode(), statuses)


async def _apply(sandbox: Sandbox, task: Task, patch: bytes) -> tuple[str | None, bytes]:
    """Why the patch does not apply, or None; and what was tried."""
    run = load_harness().run
    await sandbox.put(run.CONTAINER_PATCH_FILE, patch)
    said = []
    for attempt, git_apply in enumerate(run.GIT_APPLY_CMDS):
        if attempt:  # some leave half a patch behind
            await _step(sandbox, task, "git checkout -- . ; git clean -fd")
        command = f"{git_apply} {run.CONTAINER_PATCH_FILE}"
        result = await _step(sandbox, task, command)
        if result.exit_code == 0:
            return None, b""
        said.append(result)
    # Together they may have applied it though each of them failed.
    if (await _step(sandbox, task, f"git apply --check --reverse {run.CONTAINER_PATCH_FILE}")).exit_code == 0:
        return None, b""
    tried = zip(run.GIT_APPLY_CMDS, said, strict=True)
    log = "\n".join(f"$ {git_apply}\n{result.text}exit status {result.exit_code}\n" for git_apply, result in tried)
    return _complaint(said[0]), f"{run.APPLY_PATCH_FAIL}:\n{log}".encode()


def _complaint(result: ExecResult) -> str:
    lines = [line for line in result.text.splitlines() if line.strip()] or [f"exit status {result.exit_code}"]
    errors = [line for line in lines if line.startswith(("error: ", "fatal: "))]
    return (errors or lines)[-1][-300:]


async def _step(sandbox: Sandbox, task: Task, command: str) -> ExecResult:
    result = await sandbox.exec(command, timeout_s=_STEP_TIMEOUT_S, cwd=task.workdir)
    if result.timed_out:
        raise GradingError(f"grade {task.id}: `{command}` took more than {_STEP_TIMEOUT_S:g} s")
    return result


async def _run(sandbox: Sandbox, task: Task, script: str, timeout_s: float) -> ExecResult:
    await sandbox.put("/eval.sh", script.encode())
    command = "exec /bin/bash /eval.sh"
    return await sandbox.exec(command, timeout_s=timeout_s, cwd=task.workdir, max_output_bytes=_LARGEST_LOG)


def _judge(spec: Any, task: Task, log: str) -> tuple[Outcome, str, Mapping[str, str]]:
    """Blocks: it may have a great deal to read."""
    try:
        report = report_of(spec, log)
    except UnreadableError as exc:
        return "ended_early", f"no result: {exc}", _NONE
    if not report.found:
        return "ended_early", why_unread(log, report.guess), _NONE
    wrong = difference(report.statuses, task.expected, _SHOWN)
    reason = wrong or f"all {len(task.expected)} as expected"
    return "passed" if report.resolved else "failed", reason, report.statuses

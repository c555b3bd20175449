"""A Harbor task's verifier: the agent's change in a fresh sandbox, then `tests/test.sh`, which writes the reward.

Departures from Harbor: the verifier runs in a fresh sandbox with the agent's change to the workdir, not in the agent's
own container; what the agent did elsewhere, and processes it left, are not there. The whole change is taken over, with
tests and configuration, since a task may ask for any file: a reward is as hard to fool as its test.sh.

The reward is read from /logs/verifier/reward.txt, else from reward.json (its `reward`, or its only entry). Where it is
missing or no number, the untouched image is tried: if the verifier fails there too, the change is not to blame.
"""

import io
import json
import math
import shlex
import tarfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent_r3.envs.sandbox import ExecResult, FileMissingError, Sandbox, SandboxProvider
from agent_r3.envs.whole_patch import apply_whole
from agent_r3.errors import DataError, GradingError
from agent_r3.types import Grade, Outcome, Task

_STEP_TIMEOUT_S = 120.0
_SOLUTION_TIMEOUT_S = 600.0
_LOGS = "/logs/verifier"
_LARGEST_REWARD = 1 << 16  # bytes

Acquire = Callable[[], Awaitable[Sandbox]]


class _NoRewardError(Exception):
    """The verifier ended without a reward that can be read; the message says how."""


async def grade_harbor(acquire: Acquire, task: Task, patch: bytes, timeout_s: float) -> Grade:
    """The verifier's reward for `patch`. `acquire` gives fresh sandboxes for grading.

    Raises SandboxError from the sandboxes, GradingError when a step of ours or the verifier itself fails.
    """
    started = time.perf_counter()

    def grade(reward: float, outcome: Outcome, reason: str) -> Grade:
        return Grade(reward, {}, reason, time.perf_counter() - started, outcome=outcome)

    try:
        reward = await _verified(acquire, task, patch, timeout_s)
    except _RefusedError as exc:
        return grade(0.0, "unapplied", f"the patch does not apply: {exc}")
    except _TimeoutError:
        return grade(0.0, "timeout", f"timed out after {timeout_s:g} s")
    except _NoRewardError as exc:
        if not patch.strip():
            raise GradingError(f"grade {task.id}: the verifier fails without any change: {exc}") from exc
        await _require_sound_verifier(acquire, task, timeout_s)
        return grade(0.0, "ended_early", str(exc))
    return grade(reward, "passed" if reward >= 1 else "failed", f"the verifier's reward is {reward:g}")


class _RefusedError(Exception):
    """git's complaint about the patch."""


class _TimeoutError(Exception):
    """The verifier ran out of time."""


async def _require_sound_verifier(acquire: Acquire, task: Task, timeout_s: float) -> None:
    """Raises GradingError when the verifier gives no reward for the untouched image either."""
    try:
        await _verified(acquire, task, b"", timeout_s)
    except _TimeoutError:
        return  # it may take longer where nothing is done; it has started at least
    except _NoRewardError as exc:
        raise GradingError(f"grade {task.id}: the verifier fails without any change: {exc}") from exc


async def _verified(acquire: Acquire, task: Task, patch: bytes, timeout_s: float) -> float:
    sandbox = await acquire()
    try:
        if patch.strip() and (complaint := await apply_whole(sandbox, task, patch)) is not None:
            raise _RefusedError(complaint)
        if task.hidden_tests_dir is None:
            raise DataError(f"task {task.id} has no folder of tests")
        await put_folder(sandbox, task.hidden_tests_dir, "/tests", also=f"rm -rf {_LOGS}; mkdir -p {_LOGS} /logs/agent")
        result = await sandbox.exec(task.test_command, timeout_s=timeout_s, cwd=task.workdir)
        if result.timed_out:
            raise _TimeoutError
        return await _reward(sandbox, result)
    finally:
        await sandbox.close()


async def _reward(sandbox: Sandbox, result: ExecResult) -> float:
    for name in ("reward.txt", "reward.json"):
        try:
            raw = await sandbox.get(f"{_LOGS}/{name}", max_bytes=_LARGEST_REWARD)
        except FileMissingError:
            continue
        except OSError as exc:
            raise _NoRewardError(f"{name} cannot be read: {exc}") from exc
        try:
            return _number(name, raw)
        except (ValueError, TypeError, AttributeError, RecursionError) as exc:
            raise _NoRewardError(f"{name} holds no reward: {raw[:60]!r}") from exc
    raise _NoRewardError(f"test.sh ended with {result.exit_code} and wrote no reward: {_end(result)}")


def _number(name: str, raw: bytes) -> float:
    reward: Any = raw
    if name.endswith(".json"):
        table = json.loads(raw)
        reward = table["reward"] if "reward" in table else next(iter(table.values())) if len(table) == 1 else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise TypeError
    if not math.isfinite(number := float(reward)):
        raise ValueError
    return number


async def gold_patch(provider: SandboxProvider, task: Task) -> bytes:
    """The gold patch of any task; of a Harbor task what `solution/solve.sh` changes in an agent's sandbox.

    Raises DataError when the solution fails, SandboxError.
    """
    if task.solution_dir is None:
        return task.gold_patch.encode()
    sandbox = await provider.acquire(task)
    try:
        await put_folder(sandbox, task.solution_dir, "/solution")
        result = await sandbox.exec("bash /solution/solve.sh", timeout_s=_SOLUTION_TIMEOUT_S, cwd=task.workdir)
        if result.exit_code:
            raise DataError(f"task {task.id}: its solution ended with exit status {result.exit_code}: {_end(result)}")
        return await sandbox.diff()
    finally:
        await sandbox.close()


async def put_folder(sandbox: Sandbox, folder: Path, place: str, also: str = "") -> None:
    """Copy a folder of this host into the sandbox, in place of what is there."""
    archive = f"{place}.tar"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, arcname=".", filter=_as_root)
    await sandbox.put(archive, buffer.getvalue())
    quoted = shlex.quote(place)
    result = await sandbox.exec(
        f"set -e; rm -rf {quoted}; mkdir {quoted}; tar -xf {archive} -C {quoted}; rm {archive}; {also}",
        timeout_s=_STEP_TIMEOUT_S,
        cwd="/",
    )
    if result.exit_code:
        raise GradingError(f"{sandbox.id}: put {place} in: exit status {result.exit_code}: {_end(result)}")


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry


def _end(result: ExecResult) -> str:
    return " ".join(result.text.split())[-300:]

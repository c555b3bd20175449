"""Grading: the hidden tests' verdict on a patch, from a fresh container."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from agent_r3.config import GradingConfig
from agent_r3.envs.hidden_tests import PytestRun, run_hidden_tests
from agent_r3.envs.sandbox import FileMissingError, SandboxProvider
from agent_r3.errors import GradingError, SandboxError
from agent_r3.types import Grade, Task

_SHARED_GRADES = 4_096  # grades kept for reuse: a run's recent groups many times over
_SHOWN = 3


class Grader:
    """Grades patches in fresh containers of a provider.

    Equal (task, patch) pairs are graded once, also when they come at the same time: the first one runs, the others wait
    for it. When it fails for a reason of the infrastructure, the next one tries.
    """

    def __init__(self, provider: SandboxProvider, config: GradingConfig) -> None:
        self._provider = provider
        self._config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._shared: OrderedDict[tuple[str, bytes], Grade] = OrderedDict()
        self._running: dict[tuple[str, bytes], _Turnstile] = {}

    async def grade(self, task: Task, patch: bytes) -> Grade:
        """Reward 1 if the hidden tests give exactly the expected statuses, else 0.

        A patch that does not apply or tests that time out are the agent's failure: reward 0 with the reason. Raises
        GradingError for whatever is not.
        """
        if not self._config.reuse:
            return await self._grade(task, patch)
        key = (task.id, hashlib.sha256(patch).digest())
        async with self._one_at_a_time(key):
            if (known := self._shared.get(key)) is not None:
                return replace(known, cached=True)
            grade = self._shared[key] = await self._grade(task, patch)
            if len(self._shared) > _SHARED_GRADES:
                self._shared.popitem(last=False)
            return grade

    @asynccontextmanager
    async def _one_at_a_time(self, key: tuple[str, bytes]) -> AsyncIterator[None]:
        turnstile = self._running.setdefault(key, _Turnstile())
        turnstile.users += 1
        try:
            async with turnstile.lock:
                yield
        finally:
            turnstile.users -= 1
            if not turnstile.users:
                del self._running[key]

    async def _grade(self, task: Task, patch: bytes) -> Grade:
        async with self._slots:
            with _as_grading_error(task):
                sandbox = await self._provider.acquire_for_grading(task)
                try:
                    run = await run_hidden_tests(sandbox, task, patch, self._config.timeout_s)
                finally:
                    await sandbox.close()
        reason = objection(run, task.expected, self._config.timeout_s)
        return Grade(
            reward=0.0 if reason else 1.0,
            statuses=run.statuses,
            reason=reason or f"all {len(task.expected)} as expected",
            seconds=run.seconds,
        )


def objection(run: PytestRun, expected: Mapping[str, str], timeout_s: float) -> str | None:
    """Why a run does not earn the reward, in one line; None when it does. Pure.

    The exit status and pytest's own report must agree with the statuses: a summary can be printed by anyone.
    """
    if run.unapplied is not None:
        return f"the patch does not apply: {run.unapplied}"
    if run.timed_out:
        return f"exit status {run.exit_code}: timed out after {timeout_s:g} s"
    if difference := _difference(run.statuses, expected):
        return f"{difference} (exit status {run.exit_code})"
    clean = all(status == "PASSED" for status in expected.values())
    # 2: pytest stops with "Interrupted" when a file could not be collected, whose name is "".
    fitting = {0} if clean else {1, 2} if "" in expected else {1}
    if run.exit_code not in fitting:
        return f"exit status {run.exit_code} does not fit the summary, which is as expected"
    if run.reported_bad is None:
        return "pytest wrote no report: its process was ended early"
    if clean != (run.reported_bad == 0):
        return f"pytest's report counts {run.reported_bad} failures and errors, the summary is as expected"
    return None


def _difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if not names:
        return None
    shown = ", ".join(
        f"{name or 'a file that could not be collected'} {found.get(name, 'missing')} "
        f"instead of {expected.get(name, 'absent')}"
        for name in names[:_SHOWN]
    )
    return f"{len(names)} of {len(expected)} differ: {shown}{', ...' if len(names) > _SHOWN else ''}"


@dataclass(slots=True)
class _Turnstile:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


@contextmanager
def _as_grading_error(task: Task) -> Iterator[None]:
    try:
        yield
    except (SandboxError, FileMissingError, OSError) as exc:
        raise GradingError(f"grade {task.id}: {exc}") from exc

"""Grading: the hidden tests' verdict on a patch, from a fresh container."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import structlog

from agent_r3.config import GradingConfig
from agent_r3.envs.harbor_grading import grade_harbor
from agent_r3.envs.hidden_tests import HiddenRun, command_of, run_hidden_tests
from agent_r3.envs.sandbox import FileMissingError, Sandbox, SandboxProvider
from agent_r3.envs.signed_report import difference
from agent_r3.envs.swe_grading import grade_swe_bench
from agent_r3.envs.swe_harness import require_spec
from agent_r3.errors import GradingError, InfraError
from agent_r3.types import Grade, Source, Task

log = structlog.get_logger(__name__)

_BACK_OFF_S = 0.5  # before the first retry; doubled for each further one
_SHARED_GRADES = 4_096  # grades kept for reuse: a run's recent groups many times over
_SHARED_LOGS = 256 << 20  # bytes of logs in them
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
        self._shared_logs = 0
        self._running: dict[tuple[str, bytes], _Turnstile] = {}
        self._open_images: set[str] = set()

    async def grade(self, task: Task, patch: bytes) -> Grade:
        """Reward 1 if the hidden tests give exactly the expected statuses, else 0. SWE-bench's own harness has its say.

        A patch that does not apply, tests that run out of time and a run that is not an honest one are the agent's
        failure: reward 0 with the reason. Raises GradingError for whatever is not, after `retries` more tries, and
        DataError for a task that cannot be graded.
        """
        if not self._config.reuse:
            return await self._grade(task, patch)
        key = (task.id, hashlib.sha256(patch).digest())
        async with self._one_at_a_time(key):
            if (known := self._shared.get(key)) is not None:
                return replace(known, cached=True)
            grade = await self._grade(task, patch)
            self._share(key, grade)
            return grade

    def _share(self, key: tuple[str, bytes], grade: Grade) -> None:
        self._shared[key] = grade
        self._shared_logs += len(grade.log)
        while len(self._shared) > _SHARED_GRADES or (self._shared_logs > _SHARED_LOGS and len(self._shared) > 1):
            _, oldest = self._shared.popitem(last=False)
            self._shared_logs -= len(oldest.log)

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
        if len(patch) > self._config.max_patch_bytes:
            reason = f"the patch has {len(patch)} bytes, at most {self._config.max_patch_bytes} are graded"
            return Grade(0.0, {}, reason, 0.0, outcome="too_large")
        grades = [await self._grade_with_retries(task, patch) for _ in range(self._config.runs)]
        worst = min(grades, key=lambda grade: grade.reward)
        flaky = any((grade.outcome, grade.statuses) != (worst.outcome, worst.statuses) for grade in grades)
        return replace(worst, flaky=flaky, seconds=sum(grade.seconds for grade in grades))

    async def _grade_with_retries(self, task: Task, patch: bytes) -> Grade:
        """One grade. Failures that are ours are tried again in fresh sandboxes; then raises GradingError."""
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(_BACK_OFF_S * 2 ** (attempt - 1))
            try:
                async with self._slots:
                    return await self._grade_once(task, patch)
            except (InfraError, FileMissingError, OSError) as exc:
                failure: Exception = exc
                log.warning("grading failed", task=task.id, attempt=attempt, error=str(exc))
        if isinstance(failure, GradingError):
            raise failure
        raise GradingError(f"grade {task.id}: {failure}") from failure

    async def _grade_once(self, task: Task, patch: bytes) -> Grade:
        timeout_s = task.test_timeout_s or self._config.timeout_s
        if task.source is Source.SWE_BENCH:
            return await grade_swe_bench(lambda: self._provider.acquire_for_grading(task), task, patch, timeout_s)
        if task.source is Source.HARBOR:
            return await grade_harbor(lambda: self._provider.acquire_for_grading(task), task, patch, timeout_s)
        require_gradable(task)
        sandbox = await self._provider.acquire_for_grading(task)
        try:
            self._warn_if_open(sandbox, task)
            return judge(await run_hidden_tests(sandbox, task, patch, timeout_s), task)
        finally:
            await sandbox.close()

    def _warn_if_open(self, sandbox: Sandbox, task: Task) -> None:
        if not sandbox.protected and task.image not in self._open_images:
            self._open_images.add(task.image)
            log.warning("tests could answer in the runner's place: the image has no usable Python", image=task.image)


def require_gradable(task: Task) -> None:
    """Raises UserError for a task whose patches cannot be graded here. Known before anything is run."""
    match task.source:
        case Source.SWE_BENCH:
            require_spec(task)
        case Source.HARBOR:
            pass
        case _:
            command_of(task)


def judge(run: HiddenRun, task: Task) -> Grade:
    """Reward 1 for a whole, honest run whose statuses are exactly the expected ones. Pure."""
    if run.outcome is not None:
        reason = f"the patch does not apply: {run.problem}" if run.outcome == "unapplied" else run.problem
        return Grade(0.0, {}, reason, run.seconds, outcome=run.outcome, left_out=run.left_out)
    found = run.statuses
    if task.other_tests:
        found = {name: status for name, status in found.items() if name in task.expected}
    wrong = difference(found, task.expected, _SHOWN)
    return Grade(
        reward=0.0 if wrong else 1.0,
        statuses=run.statuses,
        reason=wrong or f"all {len(task.expected)} as expected",
        seconds=run.seconds,
        outcome="failed" if wrong else "passed",
        left_out=run.left_out,
    )


@dataclass(slots=True)
class _Turnstile:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0

"""Fresh sandboxes for episodes and gradings, some of them started ahead of need, whatever host they run on."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import structlog

from agent_r3.config import SandboxConfig
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.envs.sandbox import SandboxProvider
from agent_r3.errors import SandboxError
from agent_r3.types import Task

log = structlog.get_logger(__name__)

_STALE_S = 30.0  # a warm container that no plan has named for so long makes room for one that the plan names

Key = tuple[str, str]  # image, workdir: all that a set-up container depends on


class Host(Protocol):
    """Starts sandboxes and sees them off: the Docker engine, or bwrap on this machine."""

    async def require_image(self, task: Task) -> None:
        """Have the task's image here. Raises DataError when it cannot be had, SandboxError when that failed."""
        ...

    async def start(self, task: Task) -> RunnerSandbox:
        """A started sandbox whose runner answers. Not to be cancelled. Raises DataError, SandboxError."""
        ...

    async def maintain(self, sandboxes: Collection[RunnerSandbox]) -> None:
        """Called every `watch_s`: end sandboxes that outgrew their limits, remove what was left over. Never raises."""
        ...

    async def close(self) -> None:
        """Wait until all that was started here is gone."""
        ...


@dataclass(slots=True)
class _Warm:
    """A container started ahead of need; `start` may still be under way."""

    key: Key
    start: asyncio.Task[RunnerSandbox]
    named_at: float

    @property
    def usable(self) -> bool:
        if not self.start.done():
            return True
        return not self.start.cancelled() and self.start.exception() is None and self.start.result().alive


class SandboxPool(SandboxProvider):
    """Sandboxes are single-use; at most `config.warm` wait for use. Usable as an async context manager."""

    def __init__(self, host: Host, config: SandboxConfig) -> None:
        self._config = config
        self._host = host
        self._plan: list[Task] = []
        self._warm: list[_Warm] = []
        self._starts: set[asyncio.Task[RunnerSandbox]] = set()
        self._open: set[RunnerSandbox] = set()
        self._closing = False
        self._maintenance: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def prefetch(self, tasks: list[Task]) -> None:
        """Make `tasks` the plan; a task stands in it once for each container that will be wanted.

        Containers of an earlier plan stay a while, since those who asked for it may be about to come for them.
        Raises DataError for an image that is not there.
        """
        by_image = {task.image: task for task in tasks}
        await asyncio.gather(*map(self._host.require_image, by_image.values()))
        self._plan = list(tasks)
        self._fill()

    async def acquire(self, task: Task) -> RunnerSandbox:
        """A fresh sandbox set up for the agent: a warm one, else one is started. Raises DataError, SandboxError."""
        key = _key(task)
        planned = next((i for i, other in enumerate(self._plan) if _key(other) == key), None)
        if planned is not None:
            del self._plan[planned]
        start = self._take_warm(key) or self._start(task, for_agent=True)
        self._fill()
        return await self._hand_out(start)

    async def acquire_for_grading(self, task: Task) -> RunnerSandbox:
        """A fresh sandbox as its image is. Raises DataError, SandboxError."""
        return await self._hand_out(self._start(task, for_agent=False))

    async def close(self) -> None:
        """Remove every container of this pool, those handed out too. Idempotent; finishes even when cancelled."""
        self._closing = True
        self._plan = []
        ending = asyncio.create_task(self._end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(self._config.watch_s)
            await self._host.maintain([sandbox for sandbox in self._open if sandbox.alive])

    async def _end(self) -> None:
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.wait([self._maintenance])
        while self._starts:
            await asyncio.wait(self._starts)
        for sandbox in self._open:
            sandbox.close_nowait()
        self._open.clear()
        self._warm.clear()
        await self._host.close()

    def _start(self, task: Task, *, for_agent: bool) -> asyncio.Task[RunnerSandbox]:
        """Start a container in a task of its own, so that whoever waits for it may be cancelled and nothing is lost."""
        if self._closing:
            raise SandboxError(f"no container for task {task.id}: the pool is closed")
        if self._maintenance is None:
            self._maintenance = asyncio.create_task(self._maintain())
        start = asyncio.create_task(self._started(task, for_agent))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)
        return start

    async def _started(self, task: Task, for_agent: bool) -> RunnerSandbox:
        sandbox = await self._host.start(task)
        self._open = {other for other in self._open if other.alive} | {sandbox}
        if for_agent:
            try:
                await sandbox.set_up()
            except BaseException:
                sandbox.close_nowait()
                raise
        return sandbox

    async def _hand_out(self, start: asyncio.Task[RunnerSandbox]) -> RunnerSandbox:
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            start.add_done_callback(_close_unwanted)
            raise

    def _take_warm(self, key: Key) -> asyncio.Task[RunnerSandbox] | None:
        self._drop_unusable()
        fitting = [warm for warm in self._warm if warm.key == key]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda warm: not warm.start.done())
        self._warm.remove(chosen)
        return chosen.start

    def _drop_unusable(self) -> None:
        for warm in [warm for warm in self._warm if not warm.usable]:
            self._warm.remove(warm)
            if warm.start.exception() is None:
                log.warning("a warm sandbox died", sandbox=warm.start.result().id)
                warm.start.result().close_nowait()
            else:
                log.warning("a sandbox could not be started ahead of need", error=str(warm.start.exception()))

    def _fill(self) -> None:
        """Start what the plan names next, as far as `config.warm` goes."""
        if self._closing:
            return
        self._drop_unusable()
        now = time.monotonic()
        unclaimed = list(self._warm)
        missing: list[Task] = []
        for task in self._plan[: self._config.warm]:
            match = next((warm for warm in unclaimed if warm.key == _key(task)), None)
            if match is None:
                missing.append(task)
            else:
                unclaimed.remove(match)
                match.named_at = now
        for stale in unclaimed:
            if len(self._warm) + len(missing) > self._config.warm and now - stale.named_at > _STALE_S:
                self._warm.remove(stale)
                stale.start.add_done_callback(_close_unwanted)
        for task in missing[: self._config.warm - len(self._warm)]:
            self._warm.append(_Warm(_key(task), self._start(task, for_agent=True), now))


def _key(task: Task) -> Key:
    return task.image, task.workdir


def _close_unwanted(start: asyncio.Task[RunnerSandbox]) -> None:
    if not start.cancelled() and start.exception() is None:
        start.result().close_nowait()

"""Fresh sandboxes for episodes and gradings, some of them started ahead of need, whatever host they run on."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from agent_r3.config import SandboxConfig
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.envs.sandbox import SandboxProvider
from agent_r3.envs.warm import Shelf, Start, close_unwanted
from agent_r3.errors import SandboxError
from agent_r3.types import Source, Task


class Host(Protocol):
    """Starts sandboxes and sees them off: the Docker engine, or bwrap on this machine."""

    async def require_image(self, task: Task) -> None:
        """See that the task's image is here or on its way. Raises DataError when it cannot be had, SandboxError."""
        ...

    async def start(self, task: Task) -> RunnerSandbox:
        """A started sandbox whose runner answers. Not to be cancelled. Raises DataError, SandboxError."""
        ...

    async def maintain(self, sandboxes: Collection[RunnerSandbox], planned: Collection[Task]) -> None:
        """Called at the first start and every `watch_s`: end sandboxes that outgrew their limits, remove left-overs.

        Images of `planned` are wanted next. Never raises.
        """
        ...

    def hurry(self) -> None:
        """The pool is closing: give up what is still waited for, such as an engine that is away."""
        ...

    async def close(self) -> None:
        """Wait until all that was started here is gone."""
        ...


class SandboxPool(SandboxProvider):
    """Sandboxes are single-use. Usable as an async context manager.

    Of the plan, `config.warm` sandboxes wait for use, set up for the agent. A quarter of that number, rounded up, wait
    as their images are, for the gradings to come: of the agents that are at work first, then of the plan.
    """

    def __init__(self, host: Host, config: SandboxConfig) -> None:
        self._config = config
        self._host = host
        self._plan: list[Task] = []
        self._ready = Shelf(config.warm, _set_up_facts, lambda task: self._start(task, for_agent=True))
        self._raw = Shelf(-(-config.warm // 4), _start_facts, lambda task: self._start(task, for_agent=False))
        self._at_work: list[RunnerSandbox] = []  # handed out to agents, in that order
        self._starts: set[Start] = set()
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
        Raises DataError for an image that is not there and cannot be pulled; one that can is pulled in the background.
        """
        by_image = {task.image: task for task in tasks}
        await asyncio.gather(*map(self._host.require_image, by_image.values()))
        self._plan = list(tasks)
        self._fill()

    async def acquire(self, task: Task) -> RunnerSandbox:
        """A fresh sandbox set up for the agent: a warm one, else one is started. Raises DataError, SandboxError."""
        facts = _set_up_facts(task)
        planned = next((i for i, other in enumerate(self._plan) if _set_up_facts(other) == facts), None)
        if planned is not None:
            del self._plan[planned]
        start = self._ready.take(task) or self._start(task, for_agent=True)
        self._fill()
        sandbox = await self._hand_out(start, task)
        self._at_work.append(sandbox)
        self._fill()
        return sandbox

    async def acquire_for_grading(self, task: Task) -> RunnerSandbox:
        """A fresh sandbox as its image is. Raises DataError, SandboxError."""
        task = self._for_grading(task)
        start = self._raw.take(task) or self._start(task, for_agent=False)
        self._fill()
        return await self._hand_out(start, task)

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
            await self._host.maintain([sandbox for sandbox in self._open if sandbox.alive], list(self._plan))
            await asyncio.sleep(self._config.watch_s)

    async def _end(self) -> None:
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.wait([self._maintenance])
        self._host.hurry()
        while self._starts:
            await asyncio.wait(self._starts)
        for sandbox in self._open:
            sandbox.close_nowait()
        self._ready.clear()
        self._raw.clear()
        await self._host.close()
        self._open.clear()  # not earlier: until its stream has ended, a sandbox's reading task must not be collected

    def _start(self, task: Task, *, for_agent: bool) -> Start:
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

    async def _hand_out(self, start: Start, task: Task) -> RunnerSandbox:
        try:
            sandbox = await asyncio.shield(start)
        except asyncio.CancelledError:
            start.add_done_callback(close_unwanted)
            raise
        sandbox.task = task  # it may have been started for another one that needs the same
        return sandbox

    def _fill(self) -> None:
        if self._closing:
            return
        self._at_work = [sandbox for sandbox in self._at_work if sandbox.alive]
        self._ready.fill(self._plan)
        self._raw.fill([self._for_grading(task) for task in (*(s.task for s in self._at_work), *self._plan)])

    def _for_grading(self, task: Task) -> Task:
        # Some of SWE-bench's tests talk to the internet, as its own containers may. Its agents never do.
        return replace(task, network=True) if task.source is Source.SWE_BENCH and self._config.network else task


def _start_facts(task: Task) -> tuple[object, ...]:
    """All of the task that a started sandbox depends on."""
    return task.image, task.network


def _set_up_facts(task: Task) -> tuple[object, ...]:
    """All of the task that a sandbox set up for the agent depends on."""
    return (*_start_facts(task), task.source, task.workdir, task.bug_patch, task.test_files)

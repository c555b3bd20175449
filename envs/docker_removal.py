"""Containers on their way out: each is seen off in the background, and tried again until the engine says it is gone."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import docker
import structlog

from agent_r3.envs.docker import await_removal, force_removal
from agent_r3.envs.docker_faults import FAULTS, Threads

log = structlog.get_logger(__name__)

T = TypeVar("T")

_AT_ONCE = 8
_FINISH_S = 30.0  # what closing waits for; a container that is left then has a label for the reaper
_PAUSE_S = 0.5
_LATE_S = 5.0  # for so long an engine that hung and answers again may still be at what it was asked before


class _Leaving(NamedTuple):
    removal: asyncio.Task[bool]
    late: bool


class Removals:
    """The removals of one host. `finish` waits for them, for `finish_s` seconds at most."""

    def __init__(self, api: docker.APIClient, threads: Threads, finish_s: float = _FINISH_S) -> None:
        self._finish_s = finish_s
        self._api = api
        self._threads = threads
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._leaving: dict[str, _Leaving] = {}

    def __len__(self) -> int:
        """Containers that may still be there."""
        return len(self._leaving)

    def remove(self, name: str, *, force: bool = False, late: bool = False) -> None:
        """See a container off. Its socket was closed and it goes by itself; `force` is for one that never answered.

        `late`: the engine did not say whether it made it, and may make it yet.
        """
        removal = asyncio.create_task(self._remove(name, force, late))
        self._leaving[name] = _Leaving(removal, late)
        removal.add_done_callback(lambda done: self._removed(name, done))

    def again(self) -> None:
        """Try again where a removal failed."""
        for name, leaving in list(self._leaving.items()):
            if leaving.removal.done():
                self.remove(name, force=True, late=leaving.late)

    async def finish(self) -> None:
        """Until all are gone, or the engine has not managed it for too long: that is logged."""
        deadline = time.monotonic() + self._finish_s
        while self._leaving and time.monotonic() < deadline:
            running = [leaving.removal for leaving in self._leaving.values() if not leaving.removal.done()]
            if running:
                await asyncio.wait(running, timeout=deadline - time.monotonic())
            else:
                await asyncio.sleep(_PAUSE_S)
                self.again()
        if self._leaving:
            log.error("containers are left; the next run's reaper removes them", containers=sorted(self._leaving))

    async def _remove(self, name: str, force: bool, late: bool) -> bool:
        try:
            if not force:
                await self._call(await_removal, name)
            elif not await self._call(force_removal, name) and late:
                deadline = time.monotonic() + _LATE_S
                while time.monotonic() < deadline and not await self._call(force_removal, name):
                    await asyncio.sleep(_PAUSE_S)
        except FAULTS as exc:
            log.warning("container not removed, will try again", container=name, error=str(exc))
            return False
        return True

    async def _call(self, how: Callable[[docker.APIClient, str], T], name: str) -> T:
        async with self._slots:
            return await self._threads.call(how, self._api, name)

    def _removed(self, name: str, done: asyncio.Task[bool]) -> None:
        if not done.cancelled() and done.result():
            del self._leaving[name]

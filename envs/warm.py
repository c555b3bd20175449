"""Sandboxes started ahead of need."""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import structlog

from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.types import Task

log = structlog.get_logger(__name__)

STALE_S = 30.0  # a sandbox that nobody has asked for so long makes room for one that is asked for

Start = asyncio.Task[RunnerSandbox]


@dataclass(slots=True)
class _Warm:
    """`start` may still be under way."""

    key: Hashable
    start: Start
    named_at: float

    @property
    def usable(self) -> bool:
        if not self.start.done():
            return True
        return not self.start.cancelled() and self.start.exception() is None and self.start.result().alive


class Shelf:
    """At most `size` sandboxes; those of tasks with equal `key` may stand for each other."""

    def __init__(self, size: int, key: Callable[[Task], Hashable], start: Callable[[Task], Start]) -> None:
        self._size = size
        self._key = key
        self._start = start
        self._warm: list[_Warm] = []

    def __len__(self) -> int:
        return len(self._warm)

    def take(self, task: Task) -> Start | None:
        """One that fits, by preference one that has started."""
        self._drop_unusable()
        fitting = [warm for warm in self._warm if warm.key == self._key(task)]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda warm: not warm.start.done())
        self._warm.remove(chosen)
        return chosen.start

    def fill(self, wanted: Sequence[Task]) -> None:
        """Start what `wanted` names first, as far as the shelf goes; a task stands in it once for each sandbox."""
        self._drop_unusable()
        now = time.monotonic()
        unclaimed = list(self._warm)
        missing: list[Task] = []
        for task in wanted[: self._size]:
            match = next((warm for warm in unclaimed if warm.key == self._key(task)), None)
            if match is None:
                missing.append(task)
            else:
                unclaimed.remove(match)
                match.named_at = now
        for stale in unclaimed:
            if len(self._warm) + len(missing) > self._size and now - stale.named_at > STALE_S:
                self._warm.remove(stale)
                stale.start.add_done_callback(close_unwanted)
        for task in missing[: self._size - len(self._warm)]:
            self._warm.append(_Warm(self._key(task), self._start(task), now))

    def clear(self) -> None:
        """Forget them; whoever started them ends them."""
        self._warm.clear()

    def _drop_unusable(self) -> None:
        for warm in [warm for warm in self._warm if not warm.usable]:
            self._warm.remove(warm)
            if warm.start.exception() is None:
                log.warning("a warm sandbox died", sandbox=warm.start.result().id)
                warm.start.result().close_nowait()
            else:
                log.warning("a sandbox could not be started ahead of need", error=str(warm.start.exception()))


def close_unwanted(start: Start) -> None:
    """Done callback of a start that nobody waits for any more."""
    if not start.cancelled() and start.exception() is None:
        start.result().close_nowait()

"""A run followed over time: reading after reading of its store, the rates between them, and its folder's metrics."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent_r3.metrics import read_metrics
from agent_r3.status import Gain, Metrics, RunStatus, gained, rates_over, status_of
from agent_r3.store.status_reader import RunReading, StatusReader

_WINDOW_S = 30.0
_SAMPLES_KEPT = 900
_GROUPS_KEPT = 2_000


@dataclass(frozen=True, slots=True)
class Sample:
    """What is plotted over time, at one reading."""

    time_s: float
    policy_version: int | None
    episodes_running: int
    claimed: int
    unread: int
    read: int
    tokens_per_s: float | None
    episodes_per_min: float | None
    staleness: float | None
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group that was seen while it waited in the store."""

    index: int
    reward: float
    policy_version: int


@dataclass(frozen=True, slots=True)
class View:
    """All that a page shows: the run now, and how it came there."""

    status: RunStatus
    samples: Sequence[Sample] = ()
    groups: Sequence[FinishedGroup] = ()
    lines: Sequence[Metrics] = ()  # metrics.jsonl, empty where the run's folder is not at hand


@dataclass(slots=True)
class StatusFeed:
    """Follows one run; `poll` every few seconds.

    Older samples are thinned, so that a page that stays open for days holds as many as one of an hour.
    """

    reader: StatusReader
    run: str
    folder: Path | None = None
    steps: int | None = None
    _last: RunReading | None = None
    _gains: deque[Gain] = field(default_factory=deque)
    _samples: list[Sample] = field(default_factory=list)
    _groups: dict[int, FinishedGroup] = field(default_factory=dict)
    _lines: list[dict[str, float]] = field(default_factory=list)
    _read_at: tuple[int, int] | None = None  # mtime and size of metrics.jsonl as it was read

    def poll(self) -> View:
        """The run as it is now. Raises StoreError when the server goes away; the next poll may succeed."""
        reading = self.reader.read(self.run)
        if self._last is not None:
            self._gains.append(gained(self._last, reading))
            while sum(gain.seconds for gain in self._gains) - self._gains[0].seconds >= _WINDOW_S:
                self._gains.popleft()
        self._last = reading
        self._read_lines()
        line = self._lines[-1] if self._lines else None
        status = status_of(reading, rates=rates_over(self._gains), metrics=line, steps=self.steps)
        self._remember(reading, status)
        return View(status, tuple(self._samples), tuple(self._groups.values()), tuple(self._lines))

    def _read_lines(self) -> None:
        if self.folder is None:
            return
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        state = path.stat()
        if (found := (state.st_mtime_ns, state.st_size)) != self._read_at:
            self._lines = read_metrics(self.folder)
            self._read_at = found

    def _remember(self, reading: RunReading, status: RunStatus) -> None:
        self._samples.append(
            Sample(
                time_s=reading.time_s,
                policy_version=status.policy_version,
                episodes_running=sum(role.episodes_running or 0 for role in status.roles if role.alive == "alive"),
                claimed=sum(status.queue.claims.values()),
                unread=status.queue.unread,
                read=status.queue.read,
                tokens_per_s=status.rates.tokens_per_s,
                episodes_per_min=status.rates.episodes_per_min if status.rates.window_s else None,
                staleness=status.staleness.mean if status.staleness else None,
                failures=dict(status.failures),
            )
        )
        if len(self._samples) > _SAMPLES_KEPT:
            self._samples = self._samples[::-2][::-1]
        for waiting in reading.groups:
            group = waiting.group
            if group.rewards:
                mean = sum(group.rewards) / len(group.rewards)
                self._groups[group.index] = FinishedGroup(group.index, mean, group.policy_version)
        while len(self._groups) > _GROUPS_KEPT:
            del self._groups[min(self._groups)]

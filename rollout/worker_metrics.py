"""What a rollout worker counts: for Prometheus, for its heartbeat and for `/healthz`."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from agent_r3.telemetry import Telemetry, count_from_zero, failure_kinds
from agent_r3.trajectory import engine_counters
from agent_r3.types import Grade, Turn


class WorkerMetrics:
    """One for a worker process; the event loop writes, the threads of heartbeat and telemetry read."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.state = "starting"  # then running, stopping
        self.groups = 0  # held at the moment
        self._policy_version: int | None = None
        self._running = self._finished = 0
        self._failures: Counter[str] = Counter()
        self._version = telemetry.gauge("agent_r3_policy_version")
        self._episodes_running = telemetry.gauge("agent_r3_episodes_running")
        self._episodes = telemetry.counter("agent_r3_episodes_total")
        self._infra = telemetry.counter("agent_r3_infra_failures_total")
        self._published = telemetry.counter("agent_r3_groups_published_total")
        self._tokens = telemetry.counter("agent_r3_tokens_total")
        self._turns = telemetry.histogram("agent_r3_turn_seconds")
        count_from_zero(self._infra, "kind", (*failure_kinds(), "claim_lost"))
        count_from_zero(self._tokens, "kind", ("prompt", "cached", "sampled", "reprefilled"))

    def payload(self) -> dict[str, object]:
        """Of the heartbeat."""
        idle = self.state == "running" and not self.groups
        return {
            "state": "waiting" if idle else self.state,
            "policy_version": self._policy_version,
            "groups_running": self.groups,
            "episodes_running": self._running,
            "episodes": self._finished,
            "failures": dict(self._failures),
        }

    @contextmanager
    def group(self) -> Iterator[None]:
        """While a group is held."""
        self.groups += 1
        try:
            yield
        finally:
            self.groups -= 1

    @contextmanager
    def episode(self, policy_version: int) -> Iterator[None]:
        """While an attempt at an episode runs, up to its grade."""
        self._policy_version = policy_version
        self._version.set(policy_version)
        self._running += 1
        self._episodes_running.set(self._running)
        try:
            yield
        finally:
            self._running -= 1
            self._episodes_running.set(self._running)

    def turn(self, turn: Turn) -> None:
        """A turn that is in the store."""
        counters = engine_counters([turn])
        for kind in ("prompt", "cached", "reprefilled"):
            self._tokens.labels(kind=kind).inc(counters[f"{kind}_tokens"])
        self._tokens.labels(kind="sampled").inc(len(turn.sampled_ids))
        for stage, seconds in turn.seconds.items():
            self._turns.labels(stage=stage).observe(seconds)

    def finished(self, ending: str, grade: Grade) -> None:
        self._finished += 1
        self._episodes.labels(ending=ending, outcome=grade.outcome).inc()

    def failed(self, kind: str) -> None:
        """An infrastructure failure of an episode."""
        self._failures[kind] += 1
        self._infra.labels(kind=kind).inc()

    def published(self) -> None:
        """A group is the trainer's."""
        self._published.inc()

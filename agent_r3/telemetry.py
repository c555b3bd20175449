"""What a role shows to who runs it: `/healthz` for the orchestrator, `/metrics` for Prometheus.

SGLang serves its own metrics on the engine's port (`engine.metrics`); they are not listed here.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from agent_r3.config import ServiceConfig
from agent_r3.errors import InfraError, UserError
from agent_r3.small_server import Answer, SmallServer

M = TypeVar("M", Counter, Gauge, Histogram)

_STUCK_S = 30.0  # an event loop that has not moved for so long does no work
# A turn of a small model takes tens of milliseconds, one of a large model with a long tool call minutes.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metric(NamedTuple):
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    meaning: str


METRICS: dict[str, Metric] = {
    # Every role
    "agent_r3_up": Metric("gauge", ("role", "run"), "1 while the role is healthy, as /healthz says"),
    "agent_r3_policy_version": Metric("gauge", (), "policy version that the role is at"),
    # Trainer
    "agent_r3_step": Metric("gauge", (), "training steps made"),
    "agent_r3_metric": Metric("gauge", ("name",), "a figure of the last line of metrics.jsonl, by its name there"),
    "agent_r3_step_seconds": Metric("gauge", ("stage",), "seconds of a stage of the last step; `step` is all of it"),
    # Rollout worker; episodes of a held set are counted too
    "agent_r3_episodes_total": Metric("counter", ("ending", "outcome"), "graded episodes, by ending and grade"),
    "agent_r3_infra_failures_total": Metric("counter", ("kind",), "infrastructure failures of episodes; no rewards"),
    "agent_r3_episodes_running": Metric("gauge", (), "episodes that are running, their grading included"),
    "agent_r3_groups_published_total": Metric("counter", (), "groups handed to the trainer"),
    "agent_r3_tokens_total": Metric(
        "counter",
        ("kind",),
        "tokens of turns: `prompt` sent to the engine, of those `cached`; `sampled`; `reprefilled`, computed again",
    ),
    "agent_r3_turn_seconds": Metric("histogram", ("stage",), "seconds of a turn in `generate` and in `tools`"),
    # Broker
    "agent_r3_sandboxes": Metric("gauge", (), "sandboxes that clients have open"),
    "agent_r3_sandbox_starts_total": Metric("counter", (), "sandboxes handed to clients"),
    "agent_r3_grades_total": Metric("counter", ("outcome",), "grades given"),
    "agent_r3_broker_refusals_total": Metric("counter", ("reason",), "requests refused"),
    "agent_r3_broker_clients": Metric("gauge", (), "clients that hold a lease"),
}


class Telemetry:
    """The metrics of one role.

        telemetry = Telemetry("trainer", "demo")
        telemetry.gauge("agent_r3_step").set(3)
        telemetry.counter("agent_r3_tokens_total").labels(kind="sampled").inc(17)

    Each is made from its line in `METRICS` when it is first asked for; until then it is not shown.
    """

    def __init__(self, role: str, run: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self.up = self.gauge("agent_r3_up").labels(role=role, run=run)

    def gauge(self, name: str) -> Gauge:
        return self._of(name, Gauge)

    def counter(self, name: str) -> Counter:
        return self._of(name, Counter)

    def histogram(self, name: str) -> Histogram:
        return self._of(name, Histogram, buckets=_SECONDS)

    def read(self, name: str, values: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        """Show what `values` gives at each scrape, by the values of the labels, rather than what was set.

        It is called in the thread of the scrape.
        """
        self.registry.register(_Read(name, METRICS[name], values))

    def _of(self, name: str, kind: type[M], **options: Any) -> M:
        listed = METRICS[name]
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = kind(name, listed.meaning, listed.labels, registry=self.registry, **options)
        assert isinstance(found, kind) and kind.__name__.lower() == listed.kind, f"{name} is a {listed.kind}"
        return found


class _Read(Collector):
    def __init__(self, name: str, listed: Metric, values: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        self._name, self._listed, self._values = name, listed, values

    def collect(self) -> Iterable[PrometheusMetric]:
        kind = CounterMetricFamily if self._listed.kind == "counter" else GaugeMetricFamily
        family = kind(self._name, self._listed.meaning, labels=self._listed.labels)
        for labels, value in self._values().items():
            family.add_metric(labels, value)
        yield family


@asynccontextmanager
async def watched_loop(*, stuck_s: float = _STUCK_S) -> AsyncIterator[Callable[[], str | None]]:
    """While the block lasts, a check for `Health`: one line when this event loop has stood still for long."""
    moved = time.monotonic()

    async def move() -> None:
        nonlocal moved
        while True:
            moved = time.monotonic()
            await asyncio.sleep(stuck_s / 30)

    def problem() -> str | None:
        still_s = time.monotonic() - moved
        return f"the event loop has not moved for {still_s:.0f} s" if still_s > stuck_s else None

    pulse = asyncio.create_task(move())
    try:
        yield problem
    finally:
        pulse.cancel()


class Health:
    """Why a role does not do its work, as one line, or None: what it waits for at the start, then its checks."""

    def __init__(self) -> None:
        self.starting: str | None = "starting"
        self.checks: list[Callable[[], str | None]] = []

    def __call__(self) -> str | None:
        return self.starting or next(filter(None, (check() for check in self.checks)), None)


def count_from_zero(counter: Counter, label: str, values: Iterable[str]) -> None:
    """Show the counter as 0 for each value: a rate over a series that is not there yet has no data."""
    for value in values:
        counter.labels(**{label: value})


def failure_kinds() -> list[str]:
    """Every kind that infrastructure failures are counted under."""

    def kinds(error: type[InfraError]) -> set[str]:
        return {error.kind}.union(*map(kinds, error.__subclasses__()))

    return sorted(kinds(InfraError))


@contextmanager
def serve_telemetry(
    service: ServiceConfig, telemetry: Telemetry, healthy: Callable[[], str | None]
) -> Iterator[str | None]:
    """Serve `/healthz` and `/metrics` while the block lasts, in a thread of its own. Gives the URL; None without port.

    `healthy` is called for each request of either, in yet another thread: one line that says why the role does not do
    its work, or None. Raises UserError when the port cannot be had.
    """
    if service.port is None:
        yield None
        return
    text = "text/plain; charset=utf-8"

    def answer(path: str) -> Answer:
        problem = healthy()
        telemetry.up.set(problem is None)
        match path:
            case "/healthz":
                line = " ".join((problem or "ok").split())
                return Answer(503 if problem else 200, text, f"{line}\n".encode())
            case "/metrics":
                return Answer(200, CONTENT_TYPE_LATEST, generate_latest(telemetry.registry))
            case _:
                return Answer(404, text, b"there are /healthz and /metrics\n")

    try:
        server = SmallServer(service.host, service.port, answer)
    except OSError as exc:
        raise UserError(
            f"service.port: cannot listen on {service.host}:{service.port}: {exc.strerror or exc}; "
            "stop what listens there, or choose another service.port"
        ) from exc
    with server.running():
        host = f"[{service.host}]" if ":" in service.host else service.host
        yield f"http://{host}:{server.server_address[1]}"

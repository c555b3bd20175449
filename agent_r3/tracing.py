"""OpenTelemetry traces of episodes and training steps, sent over OTLP/HTTP while `track.otlp_endpoint` is set.

    episode                        one attempt; run and worker stand in the resource
      sandbox_wait, prefix_wait
      turn
        generate, tool, append
      diff
      grade
    train_step                     with its stages: wait, load, logprobs, diagnostics, update, push

Without an endpoint a span costs one call, and OpenTelemetry is not imported.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from agent_r3.config import TrackConfig
from agent_r3.errors import UserError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Value = str | int | float | bool

_tracer: "Tracer | None" = None


class _Off:
    """The span of a process that makes none."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        return None


_OFF = _Off()


def span(name: str, **attributes: Value) -> AbstractContextManager[object]:
    """A part of the trace that the caller's task is in, or the root of a new one. An exception marks it failed."""
    return _OFF if _tracer is None else _tracer.start_as_current_span(name, attributes=attributes)


def annotate(**attributes: Value) -> None:
    """Add attributes to the innermost open span."""
    if _tracer is not None:
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes(attributes)


@contextmanager
def tracing(track: TrackConfig, role: str, **resource: Value) -> Iterator[None]:
    """Send this process's spans to `track.otlp_endpoint`, if there is one. Raises UserError without the extra `otel`.

    `resource` describes the process, such as its run. A collector that is gone or refuses costs spans, nothing else.
    """
    if track.otlp_endpoint is None:
        yield
        return
    try:
        from agent_r3.tracing_otlp import exporting, otlp_exporter
    except ImportError as exc:
        raise UserError("track.otlp_endpoint needs OpenTelemetry; `pip install agent-r3[otel]`") from exc
    with exporting(otlp_exporter(track.otlp_endpoint), {"role": role, **resource}) as tracer, using(tracer):
        yield


@contextmanager
def using(tracer: "Tracer") -> Iterator[None]:
    """Make this process's spans with `tracer`."""
    global _tracer
    before, _tracer = _tracer, tracer
    try:
        yield
    finally:
        _tracer = before

"""Where spans go: a thread that sends them in batches. Imported only where traces are made (extra `otel`)."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from agent_r3.tracing import Value

log = structlog.get_logger(__name__)

_REQUEST_S = 10.0  # of one export, its retries included
_DELAY_MS = 2_000  # spans wait this long for others to travel with
_QUEUE = 16_384  # spans; further ones are dropped while the collector takes none
_FLUSH_S = 4.0  # for what is left at the end
_LAST_S = 1.0  # for giving that up


def otlp_exporter(base_url: str) -> SpanExporter:
    """Sends to an OTLP/HTTP collector; OTEL_EXPORTER_OTLP_HEADERS may hold its key."""
    return OTLPSpanExporter(endpoint=f"{base_url.rstrip('/')}/v1/traces", timeout=_REQUEST_S)


@contextmanager
def exporting(exporter: SpanExporter, resource: Mapping[str, Value]) -> Iterator[Tracer]:
    """A tracer whose spans go to `exporter`; `resource` describes the process, by its `role` at least.

    What is left at the end is sent too, within five seconds.
    """
    described = Resource.create({"service.name": f"agent-r3-{resource['role']}", **resource})
    provider = TracerProvider(resource=described, shutdown_on_exit=False)
    reporting = _Reporting(exporter)
    provider.add_span_processor(BatchSpanProcessor(reporting, max_queue_size=_QUEUE, schedule_delay_millis=_DELAY_MS))
    library = logging.getLogger("opentelemetry")
    level = library.level
    library.setLevel(logging.CRITICAL)  # it says several times a batch that a collector is gone; we say it once
    try:
        yield provider.get_tracer("agent_r3")
    finally:
        ending = threading.Thread(target=provider.shutdown, daemon=True)  # it waits longer than a role may
        ending.start()
        ending.join(_FLUSH_S)
        if ending.is_alive():
            exporter.shutdown()  # no more retries
            ending.join(_LAST_S)
        if not ending.is_alive():
            library.setLevel(level)


class _Reporting(SpanExporter):
    """Another exporter, and one line when spans begin to be lost, one when they arrive again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See the base class."""
        taken = False
        try:
            result = self._exporter.export(spans)
            taken = result is SpanExportResult.SUCCESS
        finally:
            if taken and self._failing:
                log.info("traces arrive again")
            elif not taken and not self._failing:
                log.warning("traces are lost: the collector of track.otlp_endpoint does not take them")
            self._failing = not taken
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

"""An OTLP/HTTP collector on loopback that keeps the spans it is sent."""

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Value = str | int | float | bool


@dataclass(frozen=True)
class Seen:
    """A span as it came over the wire."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes  # b"" for a root
    attributes: Mapping[str, Value]
    resource: Mapping[str, Value]
    failed: bool
    seconds: float


class Collector:
    """What has come so far; `status` is what it answers with."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.requests = 0
        self.paths: set[str] = set()
        self.status = 200
        self.answer = threading.Event()  # nothing is answered before
        self.answer.set()
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        self.requests += 1
        self.paths.add(path)
        self.answer.wait()
        if self.status == 200:
            self.spans += _decoded(body)

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Seen) -> list[str]:
        """Names of the spans directly under one, as they began to end."""
        return [span.name for span in self.spans if span.trace == parent.trace and span.parent == parent.id]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Serve on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(self.path, body)
            self.send_response(collector.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.answer.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _decoded(body: bytes) -> Iterator[Seen]:
    for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _values(sent.resource.attributes)
        for scope in sent.scope_spans:
            for span in scope.spans:
                yield Seen(
                    name=span.name,
                    trace=span.trace_id,
                    id=span.span_id,
                    parent=span.parent_span_id,
                    attributes=_values(span.attributes),
                    resource=resource,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                )


def _values(pairs: Any) -> dict[str, Value]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}

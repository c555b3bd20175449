"""A small HTTP server in a thread, for a page or figures that a process shows. Only GET, only from memory."""

import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socket import SOCK_STREAM, getaddrinfo
from typing import NamedTuple

_IDLE_S = 10.0  # after which a connection that asks nothing is closed


class Answer(NamedTuple):
    """`kind` is the Content-Type."""

    status: int
    kind: str
    body: bytes


class SmallServer(socketserver.ThreadingTCPServer):
    """Answers each GET with what `answer` gives for its path, in a thread of its own; the query is left out."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, host: str, port: int, answer: Callable[[str], Answer], *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Listens; `headers` go with every answer. Raises OSError, or OverflowError for no port."""
        family, _, _, _, address = getaddrinfo(host, port, type=SOCK_STREAM)[0]
        self.address_family = family
        self.answer = answer
        self.headers = headers or {}
        super().__init__((str(address[0]), port), _Handler)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve while the block lasts, then close."""
        thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="small-server", daemon=True)
        with self:
            thread.start()
            try:
                yield
            finally:
                self.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: SmallServer
    timeout = _IDLE_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status, kind, body = self.server.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: a scrape or a refresh every few seconds is no news."""

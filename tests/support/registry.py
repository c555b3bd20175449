"""A real registry for a private engine, and in front of it a proxy that turns requests away or makes them wait."""

import contextlib
import ctypes
import http.client
import http.server
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import docker
import pytest

from tests.support.private_engine import PrivateEngine

_CLONE_NEWNET = 0x40000000
_HOP_BY_HOP = ("content-length", "transfer-encoding", "connection", "date")
_PORT = 5000  # in the engine's own network namespace, where nobody else is


class Registry:
    """`refuse` requests for manifests are answered with 429; while `open` is not set, they wait."""

    address = f"127.0.0.1:{_PORT}"  # an engine takes registries on this network without TLS

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.refuse = 0
        self.open = threading.Event()
        self.open.set()
        self.asked: list[str] = []  # the paths of requests for manifests

    def push(self, engine: docker.APIClient, image: str) -> str:
        """Push an image of the engine that is named after this registry; returns its digest."""
        events = list(engine.push(image, stream=True, decode=True))
        assert not any("error" in event for event in events), events[-1]
        return next(str(event["aux"]["Digest"]) for event in events if "aux" in event)


@pytest.fixture(scope="session")
def registry_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Debian's docker-registry (scripts/test-services.sh) on a free port of this host."""
    folder = tmp_path_factory.mktemp("registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    config = folder / "config.yml"
    config.write_text(
        "version: 0.1\nlog: {level: warn}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}', relativeurls: true}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def registry(private_engine: PrivateEngine, registry_port: int) -> Iterator[Registry]:
    with registry_for(private_engine, registry_port) as registry:
        yield registry


@contextlib.contextmanager
def registry_for(engine: PrivateEngine, port: int) -> Iterator[Registry]:
    """The registry as `engine` reaches it, until that is started anew."""
    registry = Registry(port)
    with engine.network() as namespace:
        listening = _listen_in(namespace)
    server = _Server(registry, listening)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield registry
    registry.open.set()
    server.shutdown()
    thread.join()
    server.server_close()


def _listen_in(namespace: int) -> socket.socket:
    """A socket belongs to the namespace of the thread that made it."""
    made: list[socket.socket] = []

    def make() -> None:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        made.append(socket.create_server(("127.0.0.1", _PORT)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, registry: Registry, listening: socket.socket) -> None:
        super().__init__(("127.0.0.1", _PORT), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.registry = registry


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        registry = self.server.registry
        body = self._body()
        if "/manifests/" in self.path and self.command in ("GET", "HEAD"):
            registry.asked.append(self.path)
            registry.open.wait(60)
            if registry.refuse > 0:
                registry.refuse -= 1
                self._answer(429, [], b"")
                return
        upstream = http.client.HTTPConnection("127.0.0.1", registry.upstream)
        with contextlib.closing(upstream):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read(), answer.getheader("Content-Length"))

    do_HEAD = do_POST = do_PUT = do_PATCH = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts: list[bytes] = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""

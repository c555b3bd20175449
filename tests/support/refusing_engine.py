"""The real engine behind a socket that answers some requests itself, as an overloaded engine does."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_ENGINE = "/var/run/docker.sock"


@dataclass
class RefusingEngine:
    """The next requests whose `METHOD path` matches `what` get the statuses of `refusals`; the others pass."""

    url: str
    what: str = "POST .*/containers/create"
    refusals: list[int] = field(default_factory=list)
    message: str = "try again later"
    asked: int = 0  # requests that matched

    def refusal(self, request_line: str) -> int | None:
        if not re.match(self.what, request_line):
            return None
        self.asked += 1
        return self.refusals.pop(0) if self.refusals else None


@pytest.fixture
def refusing_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusingEngine]:
    """DOCKER_HOST leads to it."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "engine.sock"))
    listening.listen(64)
    engine = RefusingEngine(f"unix://{tmp_path}/engine.sock")
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    threading.Thread(target=_accept, args=(listening, engine), daemon=True).start()
    yield engine
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def _accept(listening: socket.socket, engine: RefusingEngine) -> None:
    while True:
        try:
            client, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(client, engine), daemon=True).start()


def _serve(client: socket.socket, engine: RefusingEngine) -> None:
    """One connection carries one request: our client asks for `Connection: close`."""
    with client, contextlib.suppress(OSError):
        head = client.recv(1 << 16)
        status = engine.refusal(head.split(b"\r\n", 1)[0].decode())
        if status is not None:
            _swallow_body(client, head)
            body = f'{{"message": "{engine.message}"}}'.encode()
            headers = "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close"
            client.sendall("\r\n".join((f"HTTP/1.1 {status} Refused", *headers, "", "")).encode() + body)
            return
        with socket.socket(socket.AF_UNIX) as real:
            real.connect(_ENGINE)
            real.sendall(head)
            back = threading.Thread(target=_copy, args=(real, client), daemon=True)
            back.start()
            _copy(client, real)
            back.join()


def _swallow_body(client: socket.socket, head: bytes) -> None:
    """A client that is still sending would see a broken connection instead of the answer."""
    top, _, rest = head.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", top)
    left = int(length[1]) - len(rest) if length else 0
    while left > 0 and (data := client.recv(min(left, 1 << 16))):
        left -= len(data)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

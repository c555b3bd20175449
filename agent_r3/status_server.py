"""`agent-r3 status --web`: follows a run from one thread and serves its page from others."""

import json
import socketserver
import threading
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from typing import Any

from agent_r3 import status_page
from agent_r3.errors import AgentR3Error, UserError
from agent_r3.status_feed import StatusFeed, View

POLL_S = 2.0
_IDLE_S = 10.0  # after which a connection that asks nothing is closed


class StatusServer:
    """Serves a run's page while the block lasts; the run is read every two seconds whether or not anyone looks.

        with StatusServer(feed, "127.0.0.1", 8642) as server:
            print(server.url)
            server.follow(until=stopped)

    `/` is the page, `/status.json` what it shows now, `/history.json` its curves over time. A store that goes away
    is said on the page, and read again when it is back. Raises UserError when the port cannot be had, and whatever
    the first reading raises.
    """

    def __init__(self, feed: StatusFeed, host: str, port: int, *, poll_s: float = POLL_S) -> None:
        self._feed = feed
        self._poll_s = poll_s
        self._shown: tuple[View, str | None] = (feed.poll(), None)
        try:
            self._server = _Server((host, port), self.shown)
        except (OSError, OverflowError) as exc:
            reason = getattr(exc, "strerror", None) or exc
            raise UserError(
                f"--web: cannot listen on {host}:{port}: {reason}; choose another port with --web PORT"
            ) from exc
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="status", daemon=True)

    @property
    def url(self) -> str:
        """Where a browser on this machine finds the page."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> "StatusServer":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def follow(self, until: threading.Event) -> None:
        """Read the run again and again until the event is set."""
        while not until.wait(self._poll_s):
            try:
                self._shown = (self._feed.poll(), None)
            except AgentR3Error as exc:
                self._shown = (self._shown[0], str(exc))

    def shown(self) -> tuple[View, str | None]:
        """The latest view, and why there is no newer one."""
        return self._shown


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], shown: Callable[[], tuple[View, str | None]]) -> None:
        self.shown = shown
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        view, problem = self.server.shown()
        match self.path.partition("?")[0]:
            case "/":
                self._answer(200, "text/html", status_page.page(view, problem))
            case "/status.json":
                found: dict[str, Any] = {"status": view.status.as_json(), "problem": problem}
                self._answer_json(found | {"html": status_page.fragments(view, problem)})
            case "/history.json":
                self._answer_json([asdict(sample) for sample in view.samples])
            case _:
                self._answer(404, "text/plain", "there are /, /status.json and /history.json\n")

    def _answer_json(self, value: object) -> None:
        self._answer(200, "application/json", json.dumps(value, allow_nan=False))

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", status_page.POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: a page that refreshes itself is no news."""

"""`agent-r3 status --web`: follows a run from one thread and serves its page from others."""

import json
import threading
from dataclasses import asdict
from typing import Any

from agent_r3 import status_page
from agent_r3.errors import AgentR3Error, UserError
from agent_r3.small_server import Answer, SmallServer
from agent_r3.status_feed import StatusFeed, View

POLL_S = 2.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": status_page.POLICY,
    "X-Content-Type-Options": "nosniff",
}


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
            self._server = SmallServer(host, port, self._answer, headers=_HEADERS)
        except (OSError, OverflowError) as exc:
            reason = getattr(exc, "strerror", None) or exc
            raise UserError(
                f"--web: cannot listen on {host}:{port}: {reason}; choose another port with --web PORT"
            ) from exc
        self._running = self._server.running()

    @property
    def url(self) -> str:
        """Where a browser on this machine finds the page."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> "StatusServer":
        self._running.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._running.__exit__(*exc_info)

    def follow(self, until: threading.Event) -> None:
        """Read the run again and again until the event is set."""
        while not until.wait(self._poll_s):
            try:
                self._shown = (self._feed.poll(), None)
            except AgentR3Error as exc:
                self._shown = (self._shown[0], str(exc))

    def _answer(self, path: str) -> Answer:
        view, problem = self._shown
        match path:
            case "/":
                return _text(200, "text/html", status_page.page(view, problem))
            case "/status.json":
                found: dict[str, Any] = {"status": view.status.as_json(), "problem": problem}
                return _json(found | {"html": status_page.fragments(view, problem)})
            case "/history.json":
                return _json([asdict(sample) for sample in view.samples])
            case _:
                return _text(404, "text/plain", "there are /, /status.json and /history.json\n")


def _json(value: object) -> Answer:
    return _text(200, "application/json", json.dumps(value, allow_nan=False))


def _text(status: int, kind: str, text: str) -> Answer:
    return Answer(status, f"{kind}; charset=utf-8", text.encode(errors="replace"))

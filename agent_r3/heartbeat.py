"""A role's sign of life in the store, for `agent-r3 status` and for whoever takes over a dead worker's groups."""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import redis

from agent_r3.config import StoreConfig
from agent_r3.store.connection import FOREIGN, connect, connection_url
from agent_r3.store.scripts import BEAT, Keys
from agent_r3.store.shared import ENDED_STATES, dump

EVERY_S = 2.0
_LATE_S = 15.0
_ANSWER_S = 5.0  # of the store to one beat

Payload = Callable[[], Mapping[str, object]]


class Heartbeat:
    """Writes `payload()` under the role's name every two seconds, from a thread and a connection of its own.

        with Heartbeat(config.store, "demo", "worker/a", lambda: {"state": "running"}) as heartbeat:
            heartbeat.problem()     # None, or since when the store does not answer

    The first beat is there when the block begins, the last one says that the role has stopped. Entering raises
    UserError when no server accepts us; a connection lost later is tried again at the next beat, and is nobody's error.
    `payload` is called in that thread.
    """

    def __init__(self, store: StoreConfig, run: str, role: str, payload: Payload, *, late_s: float = _LATE_S) -> None:
        """`late_s`: without a beat that came through for so long, there is a problem."""
        self._url = connection_url(store)
        self._key = Keys(run).roles
        self._role = role
        self._payload = payload
        self._late_s = late_s
        self._known = {"started": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._last = time.monotonic()
        self._error = ""

    def __enter__(self) -> "Heartbeat":
        self._client: redis.Redis = connect(self._url, socket_timeout_s=_ANSWER_S)
        self._beat({})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(2 * _ANSWER_S)
        if self.problem() is None:
            self._beat({} if self._payload().get("state") in ENDED_STATES else {"state": "stopped"})
        self._client.close()

    def problem(self) -> str | None:
        """One line when no beat has come through for a while."""
        silent_s = time.monotonic() - self._last
        return f"the store has not answered for {silent_s:.0f} s: {self._error}" if silent_s > self._late_s else None

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._beat({})

    def _beat(self, change: Mapping[str, object]) -> None:
        payload = {**self._known, **self._payload(), **change}
        try:
            self._client.register_script(BEAT)(keys=[self._key], args=[self._role, dump(payload)])
        except FOREIGN as exc:
            self._error = f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
        else:
            self._last = time.monotonic()

"""A role's sign of life in the store, for `agent-r3 status` and for whoever takes over a dead worker's groups."""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import cast

import redis

from agent_r3.config import StoreConfig
from agent_r3.errors import UserError
from agent_r3.store.connection import FOREIGN, connect, connection_url
from agent_r3.store.scripts import BEAT, Keys
from agent_r3.store.shared import ENDED_STATES, dump

EVERY_S = 2.0
_LATE_S = 15.0
_ANSWER_S = 5.0  # of the store to one beat
_FREE_S = 10.0  # a role of which there is one can be had when its process has been silent for so long

Payload = Callable[[], Mapping[str, object]]


class Heartbeat:
    """Writes `payload()` under the role's name every two seconds, from a thread and a connection of its own.

        with Heartbeat(config.store, "demo", "worker/a", lambda: {"state": "running"}) as heartbeat:
            heartbeat.problem()     # None, or since when the store does not answer

    The first beat is there when the block begins, the last one says that the role has stopped. Entering raises
    UserError when no server accepts us; a connection lost later is tried again at the next beat, and is nobody's error.
    `payload` is called in that thread.
    """

    def __init__(
        self,
        store: StoreConfig,
        run: str,
        role: str,
        payload: Payload,
        *,
        alone: bool = False,
        late_s: float = _LATE_S,
    ) -> None:
        """`alone`: the run has one process of this role. Entering then waits until an earlier one has been silent for
        ten seconds, and raises UserError where it is not; one that is known to be dead is not waited for.

        `late_s`: without a beat that came through for so long, there is a problem.
        """
        self._url = connection_url(store)
        self._run_name = run
        self._key = Keys(run).roles
        self._role = role
        self._payload = payload
        self._late_s = late_s
        self._token = uuid.uuid4().hex if alone else None
        self._known = {"started": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        if self._token:
            self._known["token"] = self._token
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._last = time.monotonic()
        self._error = ""
        self._holder: tuple[str, str] | None = None  # host and pid of another process that has the role

    def __enter__(self) -> "Heartbeat":
        self._client: redis.Redis = connect(self._url, socket_timeout_s=_ANSWER_S)
        self._take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(2 * _ANSWER_S)
        if self.problem() is None and self._holder is None:
            self._beat({} if self._payload().get("state") in ENDED_STATES else {"state": "stopped"})
        self._client.close()

    def problem(self) -> str | None:
        """One line when no beat has come through for a while."""
        silent_s = time.monotonic() - self._last
        return f"the store has not answered for {silent_s:.0f} s: {self._error}" if silent_s > self._late_s else None

    def require_alone(self) -> None:
        """Raises UserError when another process has the role by now. Asks the store."""
        self._beat({})
        self._require_role()

    def _require_role(self) -> None:
        if self._holder is not None:
            host, pid = self._holder
            raise UserError(
                f"run {self._run_name} has another {self._role}: process {pid} on {host}; there can be one. Stop that "
                "one first, or choose another name"
            )

    def _take(self) -> None:
        """The first beat, once the role can be had."""
        deadline = time.monotonic() + _FREE_S + EVERY_S
        self._beat({})
        while self._holder is not None and time.monotonic() < deadline:
            self._beat({}, free_s=0.0 if _is_dead(*self._holder) else _FREE_S)
            time.sleep(0.2)
        try:
            self._require_role()
        except UserError:
            self._client.close()
            raise

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._beat({})

    def _beat(self, change: Mapping[str, object], *, free_s: float = _FREE_S) -> None:
        payload = {**self._known, **self._payload(), **change}
        alone: list[str | float] = [self._token, free_s] if self._token else []
        try:
            script = self._client.register_script(BEAT)
            answer = cast(list[bytes], script(keys=[self._key], args=[self._role, dump(payload), *alone]))
        except FOREIGN as exc:
            self._error = f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
        else:
            self._last = time.monotonic()
            status, *holder = [part.decode() for part in answer]
            self._holder = (holder[0], holder[1]) if status == "held" else None


def _is_dead(host: str, pid: str) -> bool:
    """Whether that was a process of this machine or container and is no more; we may have got its number."""
    if host != socket.gethostname():
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return int(pid) == os.getpid() or status.rpartition(")")[2].split()[0] == "Z"

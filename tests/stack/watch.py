"""A thread that reads a run's keys in the stack's Redis all the time and remembers what will be deleted."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import redis
from docker.errors import DockerException

from agent_r3.errors import UserError
from agent_r3.store import RoleState
from agent_r3.store.connection import FOREIGN, connect
from agent_r3.store.scripts import Keys
from agent_r3.store.shared import decode_group, decode_roles
from agent_r3.types import TrajectoryGroup

_EVERY_S = 0.3
_ANSWER_S = 3.0


@dataclass(slots=True)
class Seen:
    """All that was ever seen, and the latest reading."""

    deliveries: dict[str, TrajectoryGroup] = field(default_factory=dict)  # by the id of their entry in the stream
    holders: dict[int, list[str]] = field(default_factory=dict)  # group -> each process that held its claim
    published: dict[int, str] = field(default_factory=dict)  # latest: group -> worker
    claims: dict[int, str] = field(default_factory=dict)  # latest: group -> worker
    roles: Mapping[str, RoleState] = field(default_factory=dict)  # latest
    step: int = 0  # the furthest that the trainer has been
    readings: int = 0
    at: float = 0.0  # monotonic, of the latest reading


class Watcher:
    """Writes nothing to the store. `seen` may be read from any thread; a dictionary in it is replaced, not changed.

    with Watcher(url, "chaos") as watcher:      # `url` is asked anew for each connection: addresses change
        watcher.seen.step
        watcher.fresh()                         # after one more reading
    """

    def __init__(self, url: Callable[[], str], run: str) -> None:
        self.seen = Seen()
        self._url = url
        self._keys = Keys(run)
        self._client: redis.Redis | None = None
        self._stopping = threading.Event()
        self._read_once = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._disconnect()

    def fresh(self, timeout_s: float = 60.0) -> Seen:
        """What is seen after a reading that begins no earlier than now. Raises RuntimeError where none comes."""
        asked = time.monotonic()
        with self._read_once:
            came = self._read_once.wait_for(lambda: self._failure is not None or self.seen.at >= asked, timeout_s)
        if self._failure is not None:
            raise RuntimeError("the watcher failed") from self._failure
        if not came:
            raise RuntimeError(f"the stack's Redis has not answered for {timeout_s:g} s")
        return self.seen

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                # While Redis is dead there is nothing to see; what it knows stays in its file.
                with contextlib.suppress(UserError, DockerException, *FOREIGN):
                    self._read()
                self._stopping.wait(_EVERY_S)
        except BaseException as exc:  # to whoever waits for a reading
            self._failure = exc
            with self._read_once:
                self._read_once.notify_all()
            raise

    def _read(self) -> None:
        began = time.monotonic()
        try:
            if self._client is None:
                self._client = connect(self._url(), socket_timeout_s=_ANSWER_S)
            keys = self._keys
            with self._client.pipeline(transaction=True) as pipe:
                pipe.time()
                pipe.xrange(keys.groups)
                pipe.hgetall(keys.claims)
                pipe.hgetall(keys.published)
                pipe.hgetall(keys.roles)
                answers = cast(list[Any], pipe.execute())
        except (UserError, *FOREIGN):
            self._disconnect()
            raise
        self._take(answers)
        with self._read_once:
            self.seen.readings += 1
            self.seen.at = began
            self._read_once.notify_all()

    def _take(self, answers: list[Any]) -> None:
        now, entries, claims, published, roles = answers
        seen = self.seen
        new = {entry.decode(): decode_group(fields[b"group"]) for entry, fields in entries}
        seen.deliveries = seen.deliveries | new
        parts = {int(index): claim.decode().split("\n") for index, claim in claims.items()}
        seen.claims = {index: worker for index, (worker, *_) in parts.items()}
        for index, (worker, incarnation, *_) in parts.items():
            holder = f"{worker} {incarnation}"
            if holder not in seen.holders.get(index, []):
                seen.holders = {**seen.holders, index: [*seen.holders.get(index, []), holder]}
        seen.published = {int(index): holder.decode().split("\n")[0] for index, holder in published.items()}
        seen.roles = decode_roles(roles, now[0] + now[1] / 1e6)
        trainer = seen.roles.get("trainer")
        if trainer is not None:
            seen.step = max(seen.step, int(cast(int, trainer.payload.get("step", 0))))

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

"""The trainer's side of the store: ask for groups, read them, load their trajectories, acknowledge, set the policy."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import redis

from agent_r3.errors import ContractError
from agent_r3.store import scripts
from agent_r3.store.connection import BLOCK_SLICE_S, FOREIGN, connect, lost, retrying
from agent_r3.store.records import decode_record
from agent_r3.store.scripts import Keys
from agent_r3.store.shared import (
    CONSUMER_GROUP,
    Delivery,
    Policy,
    RoleState,
    decode_end,
    decode_group,
    decode_policy,
    decode_roles,
    dump,
)
from agent_r3.trajectory import splice
from agent_r3.types import Trajectory

_EVENTS_KEPT = 16
Entries = list[tuple[bytes, dict[bytes, bytes] | None]]


class GroupReader:
    """Blocking reader of one trainer process.

        with GroupReader.connect(url, "demo") as store:
            store.reset_position(0)                                # at the start of a run, or where a checkpoint stood
            store.set_policy(0, "models/tiny")
            store.set_demand(8)                                    # workers may claim groups 0..7
            deliveries = store.read(count=8, block_s=30)
            trajectories = [store.load(id) for id in deliveries[0].group.trajectory_ids]
            store.ack(deliveries)                                  # after their step is safe: deletes them

    What was read but not acknowledged is delivered first to the next process that reads as the same `consumer`.
    Calls are idempotent and tried again for `retry_s` when the connection is lost. Raises
    StoreError when the server stays away, ContractError for data that breaks the contract.
    """

    def __init__(self, client: redis.Redis, run: str, *, consumer: str, retry_s: float) -> None:
        self._client = client
        self._keys = Keys(run)
        self._consumer = consumer
        self._retry_s = retry_s
        self._read: set[bytes] = set()  # delivered to this process, not acknowledged
        self._pending_from: bytes | None = b"0"  # where the re-delivery stands; None once it is through
        self._call("create the consumer group", self._create_consumer_group)

    @classmethod
    @contextmanager
    def connect(
        cls, url: str, run: str, *, consumer: str = "trainer-0", retry_s: float = 20.0
    ) -> Iterator["GroupReader"]:
        """A reader while the block lasts. Raises UserError when no server accepts us at `url`."""
        client = connect(url)
        try:
            yield cls(client, run, consumer=consumer, retry_s=retry_s)
        finally:
            client.close()

    def set_demand(self, total: int) -> None:
        """Let workers claim groups 0 .. total-1 of the run; wakes waiting workers."""
        self._set_and_wake("set the demand", lambda pipe: pipe.set(self._keys.demand, total))

    def set_policy(self, version: int, weights: str) -> None:
        """Publish the policy that rollouts sample from; wakes waiting workers."""
        self._set_and_wake(
            "set the policy", lambda pipe: pipe.hset(self._keys.policy, items=["version", version, "weights", weights])
        )

    def policy(self) -> Policy:
        """The published policy. Raises ContractError when none was set."""
        fields = self._call("read the policy", lambda client: client.hgetall(self._keys.policy))
        return decode_policy(cast(Mapping[bytes, bytes], fields))

    def read(self, count: int, block_s: float) -> list[Delivery]:
        """Up to `count` finished groups, as soon as there is one; an empty list after `block_s` without any."""
        deadline = time.monotonic() + block_s
        found: list[Delivery] = []
        while True:
            while self._pending_from is not None and len(found) < count:
                found += self._redeliver(count - len(found))
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            found = self._keep(self._fetch(b">", count, min(left, BLOCK_SLICE_S)))

    def load(self, trajectory_id: str) -> Trajectory:
        """A finished trajectory, its turns spliced and checked.

        Raises ContractError when it is absent or unfinished, or when tokens, turns or rows have a gap or an overlap.
        """
        keys = self._keys

        def fetch(client: redis.Redis) -> object:
            with client.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.trajectory(trajectory_id))
                pipe.lrange(keys.turns(trajectory_id), 0, -1)
                return pipe.execute()

        held, turns = cast(tuple[dict[bytes, bytes], list[bytes]], self._call(f"load {trajectory_id}", fetch))
        if b"end" not in held:
            state = f"unfinished with {len(turns)} turns" if held else "not there"
            raise ContractError(f"trajectory {trajectory_id} is {state}")
        end = decode_end(trajectory_id, held[b"group_id"].decode(), held[b"task_id"].decode(), held[b"end"])
        trajectory = splice([decode_record(data) for data in turns], end)
        if len(trajectory.tokens) != int(held[b"length"]):
            raise ContractError(
                f"trajectory {trajectory_id}: {len(trajectory.tokens)} tokens in {len(turns)} turns, "
                f"but {int(held[b'length'])} were appended"
            )
        return trajectory

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Forget groups whose step is safe: they are never delivered again and their trajectories are deleted."""
        if not deliveries:
            return
        keys = self._keys
        ids = [trajectory for delivery in deliveries for trajectory in delivery.group.trajectory_ids]
        names = [keys.groups, *map(keys.trajectory, ids), *map(keys.turns, ids)]
        self._script(
            "acknowledge", scripts.ACK, names, [CONSUMER_GROUP, *(delivery.entry_id for delivery in deliveries)]
        )
        self._read -= {delivery.entry_id.encode() for delivery in deliveries}

    def reset_position(self, groups: int) -> None:
        """Go on at group index `groups` (0 for a new run): every claim, finished group and trajectory is dropped."""
        keys = self._keys
        self._script(
            "reset the position",
            scripts.RESET,
            [keys.demand, keys.next, keys.claims, keys.published, keys.groups],
            [groups, CONSUMER_GROUP],
        )
        for prefix in (keys.trajectory(""), keys.turns(""), keys.members("")):
            self._call("drop trajectories", partial(_delete_matching, prefix))
        self._read.clear()
        self._pending_from = None

    def heartbeat(self, role: str, payload: Mapping[str, object]) -> None:
        """Tell that `role` is alive; `payload` is JSON for `status`."""
        self._script("heartbeat", scripts.BEAT, [self._keys.roles], [role, dump(dict(payload))])

    def roles(self) -> dict[str, RoleState]:
        """Roles that ever sent a heartbeat, with its age."""

        def read(client: redis.Redis) -> object:
            with client.pipeline(transaction=True) as pipe:
                pipe.hgetall(self._keys.roles)
                pipe.time()
                return pipe.execute()

        fields, now = cast(tuple[dict[bytes, bytes], tuple[int, int]], self._call("read roles", read))
        return decode_roles(fields, now[0] + now[1] / 1e6)

    def _create_consumer_group(self, client: redis.Redis) -> None:
        try:
            client.xgroup_create(self._keys.groups, CONSUMER_GROUP, id="0", mkstream=True)
        except redis.ResponseError as exc:
            if "BUSYGROUP" not in str(exc):
                raise

    def _redeliver(self, count: int) -> list[Delivery]:
        assert self._pending_from is not None
        entries = self._fetch(self._pending_from, count, None)
        self._pending_from = entries[-1][0] if entries else None
        return self._keep((id_, fields) for id_, fields in entries if id_ not in self._read)

    def _fetch(self, after: bytes, count: int, block_s: float | None) -> Entries:
        block = None if block_s is None else max(int(block_s * 1000), 1)

        def fetch(client: redis.Redis) -> object:
            try:
                return client.xreadgroup(
                    CONSUMER_GROUP, self._consumer, {self._keys.groups: after}, count=count, block=block
                )
            except (redis.ConnectionError, redis.TimeoutError):
                # Entries of a lost answer are pending for this consumer now: look there before asking for new ones.
                self._pending_from = b"0"
                raise

        streams = cast(list[tuple[bytes, Entries]], self._call("read groups", fetch))
        return streams[0][1] if streams else []

    def _keep(self, entries: Iterable[tuple[bytes, dict[bytes, bytes] | None]]) -> list[Delivery]:
        found = []
        for entry_id, fields in entries:
            if not fields:  # deleted from the stream while it was pending
                continue
            self._read.add(entry_id)
            seconds = json.loads(fields[b"seconds"])
            found.append(Delivery(entry_id=entry_id.decode(), group=decode_group(fields[b"group"]), seconds=seconds))
        return found

    def _set_and_wake(self, what: str, change: Callable[["redis.client.Pipeline"], object]) -> None:
        def call(client: redis.Redis) -> object:
            with client.pipeline(transaction=True) as pipe:
                change(pipe)
                pipe.xadd(self._keys.events, {"what": what}, maxlen=_EVENTS_KEPT)
                return pipe.execute()

        self._call(what, call)

    def _script(self, what: str, script: str, keys: Sequence[str], args: Sequence[str | int]) -> None:
        self._call(what, lambda client: client.register_script(script)(keys=list(keys), args=list(args)))

    def _call(self, what: str, call: Callable[[redis.Redis], object]) -> object:
        try:
            return retrying(self._retry_s, what)(lambda: call(self._client))
        except FOREIGN as exc:
            raise lost(what, exc) from exc


def _delete_matching(prefix: str, client: redis.Redis) -> None:
    pattern = re.sub(r"([*?\[\]\\])", r"\\\1", prefix) + "*"
    found = list(client.scan_iter(match=pattern, count=1000))
    for first in range(0, len(found), 500):
        client.delete(*found[first : first + 500])

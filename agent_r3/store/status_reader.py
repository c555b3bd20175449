"""What a run's keys say at one moment, read without touching anything: for `agent-r3 status`."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import redis

from agent_r3.errors import ContractError, UserError, boundary
from agent_r3.store.connection import FOREIGN, connect, lost
from agent_r3.store.scripts import Keys
from agent_r3.store.shared import CONSUMER_GROUP, Policy, RoleState, decode_group, decode_policy, decode_roles
from agent_r3.types import TrajectoryGroup

_GROUPS_READ = 10_000
_RUN_KEY = re.compile(r"agent_r3:\{(.*)\}:(?:demand|next|policy|roles|groups)")
_EVALUATION = "/eval"  # a run's evaluations are a run of this suffix, see agent_r3.held_set

Entries = list[tuple[bytes, dict[bytes, bytes]]]


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A finished group that the trainer has not acknowledged."""

    entry_id: str
    published_s: float  # epoch
    unread: bool  # not yet delivered to the trainer
    group: TrajectoryGroup


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A trajectory in the store: what has been appended so far."""

    tokens: int
    finished: bool


@dataclass(frozen=True, slots=True)
class RunReading:
    """One run at one moment. `evaluation` is the run of its evaluations, where there is one."""

    run: str
    time_s: float  # epoch, by the server's clock
    roles: Mapping[str, RoleState]
    policy: Policy | None
    demand: int
    next: int
    claims: Mapping[int, str]  # group index -> worker
    published: int
    groups: tuple[WaitingGroup, ...]
    trajectories: Mapping[str, StoredTrajectory]
    bytes_used: int | None  # by the whole server; None where it does not tell us
    bytes_limit: int  # 0: none
    evaluation: "RunReading | None" = None


class StatusReader:
    """Reads runs of one store. It creates no key and no consumer, and blocks nobody.

        with StatusReader.connect(url) as store:
            reading = store.read(store.choose(None))

    Raises StoreError when the server goes away, ContractError for what no version of ours wrote.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    @classmethod
    @contextmanager
    def connect(cls, url: str) -> Iterator["StatusReader"]:
        """A reader while the block lasts. Raises UserError when no server accepts us at `url`."""
        client = connect(url)
        try:
            yield cls(client)
        finally:
            client.close()

    def runs(self) -> list[str]:
        """Names of the store's runs, sorted; evaluations in training count as part of their run."""
        with _calls("list the runs"):
            keys = [key.decode(errors="replace") for key in self._client.scan_iter(match="agent_r3:{*}:*", count=1000)]
        names = {match[1] for key in keys if (match := _RUN_KEY.fullmatch(key))}
        return sorted(name for name in names if not _is_part(name, names))

    def choose(self, run: str | None) -> str:
        """`run` if the store holds it; without one the only run there is. Raises UserError that lists what is there."""
        names = self.runs()
        if run is None:
            if len(names) == 1:
                return names[0]
            if names:
                raise UserError(f"the store holds {len(names)} runs, choose one with --run: {', '.join(names)}")
            raise UserError("the store holds no run; the trainer writes there first when it starts")
        if run in names or (run.endswith(_EVALUATION) and run.removesuffix(_EVALUATION) in names):
            return run
        there = f"it holds {', '.join(names)}" if names else "it holds none; has its trainer started?"
        raise UserError(f"no run {run!r} in the store; {there}")

    def read(self, run: str) -> RunReading:
        """The run now; empty where its keys are not there (anymore)."""
        with _calls(f"read run {run}"):
            reading = self._read(run)
            if self._client.exists(Keys(run + _EVALUATION).policy):
                return replace(reading, evaluation=self._read(run + _EVALUATION))
        return reading

    def _read(self, run: str) -> RunReading:
        keys = Keys(run)
        with self._client.pipeline(transaction=True) as pipe:
            pipe.time()
            pipe.hgetall(keys.roles)
            pipe.hgetall(keys.policy)
            pipe.mget(keys.demand, keys.next)
            pipe.hgetall(keys.claims)
            pipe.hlen(keys.published)
            pipe.xrange(keys.groups, count=_GROUPS_READ)
            pipe.xinfo_groups(keys.groups)
            answers = pipe.execute(raise_on_error=False)
        if isinstance(answers[-1], redis.ResponseError):  # no stream yet
            answers[-1] = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        now, roles, policy, counts, claims, published, entries, consumers = answers
        time_s = now[0] + now[1] / 1e6
        used, limit = self._memory()
        what = f"store: run {run} holds what this version cannot read"
        with boundary(ContractError, what, ValueError, KeyError, TypeError, AttributeError):
            return RunReading(
                run=run,
                time_s=time_s,
                roles=decode_roles(roles, time_s),
                policy=decode_policy(policy) if policy else None,
                demand=int(counts[0] or 0),
                next=int(counts[1] or 0),
                claims={int(index): claim.split(b"\n")[0].decode() for index, claim in claims.items()},
                published=published,
                groups=tuple(_waiting(entries, consumers)),
                trajectories=self._trajectories(keys),
                bytes_used=used,
                bytes_limit=limit,
            )

    def _memory(self) -> tuple[int | None, int]:
        """Bytes used and the limit; the command may be kept from us by the server's access list."""
        try:
            memory = cast(dict[str, int], self._client.info("memory"))
        except redis.exceptions.NoPermissionError:
            return None, 0
        return int(memory["used_memory"]), int(memory.get("maxmemory", 0))

    def _trajectories(self, keys: Keys) -> dict[str, StoredTrajectory]:
        prefix = keys.trajectory("")
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", prefix) + "*"
        found = list(self._client.scan_iter(match=pattern, count=1000))
        with self._client.pipeline(transaction=False) as pipe:
            for key in found:
                pipe.hmget(key, "length", "end")
            held = cast(list[tuple[bytes | None, bytes | None]], pipe.execute())
        return {
            key.decode().removeprefix(prefix): StoredTrajectory(int(length), end is not None)
            for key, (length, end) in zip(found, held, strict=True)
            if length is not None  # deleted in between
        }


def _waiting(entries: Entries, consumers: list[dict[str, Any]]) -> Iterator[WaitingGroup]:
    delivered = (0, 0)
    for group in consumers:
        if group["name"] == CONSUMER_GROUP.encode():
            delivered = _order(group["last-delivered-id"])
    for entry_id, fields in entries:
        order = _order(entry_id)
        yield WaitingGroup(entry_id.decode(), order[0] / 1000, order > delivered, decode_group(fields[b"group"]))


def _order(entry_id: bytes) -> tuple[int, int]:
    """Milliseconds and sequence: stream ids in the order of the stream."""
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence)


def _is_part(name: str, names: set[str]) -> bool:
    return name.endswith(_EVALUATION) and name.removesuffix(_EVALUATION) in names


@contextmanager
def _calls(what: str) -> Iterator[None]:
    try:
        yield
    except FOREIGN as exc:
        raise lost(what, exc) from exc

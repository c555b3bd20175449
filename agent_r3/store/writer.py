"""The rollout worker's side of the store: claim a group, append turns, publish what finished."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

import redis.asyncio
import structlog

from agent_r3.errors import ClaimLostError, ContractError
from agent_r3.store import scripts
from agent_r3.store.connection import BLOCK_SLICE_S, FOREIGN, connect_async, lost, retrying_async
from agent_r3.store.records import encode_record
from agent_r3.store.scripts import Keys
from agent_r3.store.shared import (
    Policy,
    RoleState,
    decode_policy,
    decode_roles,
    dump,
    encode_end,
    encode_group,
)
from agent_r3.trajectory import TurnRecord
from agent_r3.types import Ending, TrajectoryGroup, Turn

log = structlog.get_logger(__name__)

STALE_S = 30.0  # after so long without a sign of life a worker's claims are handed to others
Reply = list[bytes]


class TrajectoryWriter:
    """One process's writer; every call is idempotent, so it is tried again for `retry_s` when the connection is lost.

        async with TrajectoryWriter.connect(url, "demo") as store:
            index = await store.claim_group("worker-0")            # None: nothing is asked for at the moment
            await store.open_trajectory("g0-1", index, "g0", task.id)
            await store.append_turn("g0-1", turn)                  # once a turn
            await store.finish_trajectory("g0-1", 1.0, Ending.FINISH, counters)
            await store.publish_group("worker-0", group, {"generate": 12.5})

    A process started again under the same worker name takes back what its dead predecessor had claimed, and any worker
    takes what a silent one had; what the former holder had opened is dropped then, and it gets ClaimLostError from
    whatever it still tries on that group. Raises StoreError when the server stays away, ContractError for a call that
    does not fit what is stored (never retried).
    """

    def __init__(self, client: redis.asyncio.Redis, run: str, *, retry_s: float) -> None:
        self._client = client
        self._keys = Keys(run)
        self._retry_s = retry_s
        self._incarnation = uuid.uuid4().hex
        self._last_event = b"0"
        self._claiming = asyncio.Lock()  # of two claims at a time each would find the other's unknown
        self._works_on: set[int] = set()  # claimed here, neither published nor known to be lost
        self._opened: dict[str, int] = {}  # trajectory -> index of its group

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, run: str, *, retry_s: float = 20.0) -> AsyncIterator["TrajectoryWriter"]:
        """A writer while the block lasts; one a process. Raises UserError when no server accepts us at `url`."""
        client = await connect_async(url)
        try:
            yield cls(client, run, retry_s=retry_s)
        finally:
            await client.aclose()

    async def open_trajectory(self, trajectory_id: str, index: int, group_id: str, task_id: str) -> None:
        """Start an empty trajectory of the claimed group `index`.

        Raises ClaimLostError when this process does not hold the claim, ContractError when it already has turns under
        that id.
        """
        keys = self._keys
        reply = await self._run(
            f"open {trajectory_id}",
            scripts.OPEN,
            (
                *(keys.trajectory(trajectory_id), keys.turns(trajectory_id), keys.members(index)),
                *(keys.claims, keys.published),
            ),
            (self._incarnation, trajectory_id, group_id, task_id, index),
        )
        self._require_claim(reply, index, f"group {index}, trajectory {trajectory_id}")
        self._opened[trajectory_id] = index
        if reply[0] == b"exists":
            group, task, length = (part.decode() for part in reply[1:])
            raise ContractError(
                f"trajectory {trajectory_id} is already open for group {group}, task {task} with {length} tokens"
            )

    async def append_turn(self, trajectory_id: str, turn: Turn) -> None:
        """Add a turn at exactly the stored length; appending the very same turn again changes nothing.

        Raises ContractError for a gap, an overlap, another turn in that place, or arrays that do not fit.
        """
        record = TurnRecord.of(turn)
        reply = await self._run_on(
            trajectory_id,
            f"append turn {turn.index} to {trajectory_id}",
            scripts.APPEND,
            (self._incarnation, turn.index, record.start, record.stop, encode_record(record)),
        )
        what = f"trajectory {trajectory_id}: turn {turn.index} at tokens {record.start}..{record.stop - 1}"
        if reply[0] in (b"differs", b"ended", b"place"):
            turns, length = (part.decode() for part in reply[1:])
            problem = {
                b"differs": "another turn is already stored there",
                b"ended": "the trajectory has ended",
                b"place": "does not continue what is stored",
            }[reply[0]]
            raise ContractError(f"{what}: {problem} ({turns} turns, {length} tokens are stored)")

    async def finish_trajectory(
        self, trajectory_id: str, reward: float, ending: Ending, counters: Mapping[str, int]
    ) -> None:
        """Close a trajectory. `counters`: exactly prompt_tokens, cached_tokens, reprefilled_tokens."""
        reply = await self._run_on(
            trajectory_id,
            f"finish {trajectory_id}",
            scripts.FINISH,
            (self._incarnation, encode_end(reward, ending, counters)),
        )
        if reply[0] == b"empty":
            raise ContractError(f"trajectory {trajectory_id} has no turn and cannot be finished; drop it")
        if reply[0] == b"differs":
            raise ContractError(f"trajectory {trajectory_id} has already ended with {reply[1].decode()}")

    async def drop_trajectory(self, trajectory_id: str) -> None:
        """Forget a trajectory of this process (its episode failed or is tried again)."""
        keys = self._keys
        await self._run(
            f"drop {trajectory_id}",
            scripts.DROP,
            (keys.trajectory(trajectory_id), keys.turns(trajectory_id)),
            (self._incarnation, trajectory_id, keys.members("")),
        )
        self._opened.pop(trajectory_id, None)

    async def claim_group(self, worker: str, stale_s: float = STALE_S) -> int | None:
        """Index of the next group this worker shall sample, or None while the trainer asks for no more.

        First come claims of this worker that it does not work on (an earlier process's), and those of workers whose
        heartbeat, under the role `worker/<name>`, is older than `stale_s`.
        """
        keys = self._keys
        async with self._claiming:
            # The token makes a repeated call return the claim whose answer was lost, instead of a second one.
            reply = await self._run(
                "claim a group",
                scripts.CLAIM,
                (keys.claims, keys.next, keys.demand, keys.roles),
                (
                    *(worker, self._incarnation, uuid.uuid4().hex, stale_s),
                    *(keys.members(""), keys.trajectory(""), keys.turns("")),
                    *self._works_on,
                ),
            )
            if reply[0] == b"none":
                return None
            index = int(reply[1])
            self._works_on.add(index)
        if reply[0] == b"ok" and reply[2]:
            log.info("claim taken over", group=index, holder=reply[2].decode())
        return index

    async def publish_group(self, worker: str, group: TrajectoryGroup, seconds: Mapping[str, float]) -> None:
        """Hand a finished group to the trainer and release its claim, in one step.

        Trajectories opened for the group but not part of it are deleted. Raises ClaimLostError when the claim is not
        this process's, ContractError when a trajectory is not finished or belongs elsewhere.
        """
        keys = self._keys
        reply = await self._run(
            f"publish group {group.index}",
            scripts.PUBLISH,
            (keys.claims, keys.published, keys.groups, keys.members(group.index)),
            (
                *(group.index, worker, self._incarnation, group.id, encode_group(group)),
                *(dump(seconds), keys.trajectory(""), keys.turns("")),
                *group.trajectory_ids,
            ),
        )
        what = f"group {group.index} ({group.id}) of {worker}"
        self._require_claim(reply, group.index, what)
        if reply[0] == b"foreign":
            raise ContractError(f"{what}: trajectory {reply[1].decode()} is not one of this group and process")
        if reply[0] == b"unfinished":
            raise ContractError(f"{what}: trajectory {reply[1].decode()} is not finished")
        self._works_on.discard(group.index)
        self._opened = {name: index for name, index in self._opened.items() if index != group.index}

    async def policy(self) -> Policy:
        """Policy to sample from. Raises ContractError before the trainer has set one (it does so before any demand)."""
        fields = await self._call("read the policy", lambda client: client.hgetall(self._keys.policy))
        return decode_policy(cast(Mapping[bytes, bytes], fields))

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Sleep until the demand or the policy changed since the last call, at most `timeout_s`. True if it did."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            block = max(int(min(left, BLOCK_SLICE_S) * 1000), 1)

            async def read(client: redis.asyncio.Redis, block: int = block) -> object:
                return await client.xread({self._keys.events: self._last_event}, block=block)

            streams = cast(list[tuple[bytes, list[tuple[bytes, object]]]], await self._call("wait for work", read))
            if streams:
                self._last_event = streams[0][1][-1][0]
                return True
        return False

    async def heartbeat(self, role: str, payload: Mapping[str, object]) -> None:
        """Tell that `role` is alive; `payload` is JSON for `status`. A worker's role is `worker/<name>`."""
        await self._run("heartbeat", scripts.BEAT, (self._keys.roles,), (role, dump(dict(payload))))

    async def roles(self) -> dict[str, RoleState]:
        """Roles that ever sent a heartbeat, with its age."""

        async def read(client: redis.asyncio.Redis) -> object:
            async with client.pipeline(transaction=True) as pipe:
                pipe.hgetall(self._keys.roles)
                pipe.time()
                return await pipe.execute()

        fields, now = cast(tuple[dict[bytes, bytes], tuple[int, int]], await self._call("read roles", read))
        return decode_roles(fields, now[0] + now[1] / 1e6)

    async def _run_on(self, trajectory_id: str, what: str, script: str, args: Sequence[str | int | bytes]) -> Reply:
        """A script that changes a trajectory which this process must hold."""
        keys, index = self._keys, self._opened.get(trajectory_id)
        reply = await self._run(
            what,
            script,
            (keys.trajectory(trajectory_id), keys.turns(trajectory_id), keys.claims, keys.published),
            (*args, "" if index is None else index),
        )
        if index is not None:
            self._require_claim(reply, index, f"group {index}, trajectory {trajectory_id}")
        if reply[0] == b"missing":
            raise ContractError(f"trajectory {trajectory_id} is not open: never opened, dropped, or the run was reset")
        if reply[0] == b"owner":
            raise ContractError(f"trajectory {trajectory_id} is held by another process")
        return reply

    def _require_claim(self, reply: Reply, index: int, what: str) -> None:
        if reply[0] != b"lost":
            return
        self._works_on.discard(index)
        holder = reply[1].decode()
        problem = {
            b"claimed": f"it is claimed by another process of {holder}",
            b"published": f"it was published by {holder}",
            b"free": "it is not claimed; the run was reset, or the group was never claimed",
        }[reply[2]]
        raise ClaimLostError(f"{what}: {problem}")

    async def _run(
        self, what: str, script: str, keys: Sequence[str], args: Sequence[str | int | float | bytes]
    ) -> Reply:
        async def call(client: redis.asyncio.Redis) -> object:
            return await client.register_script(script)(keys=list(keys), args=list(args))

        return cast(Reply, await self._call(what, call))

    async def _call(self, what: str, call: Callable[[redis.asyncio.Redis], Awaitable[object]]) -> object:
        try:
            async for attempt in retrying_async(self._retry_s, what):
                with attempt:
                    return await call(self._client)
        except FOREIGN as exc:
            raise lost(what, exc) from exc
        raise AssertionError("unreachable: the retrier returns or raises")

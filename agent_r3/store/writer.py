"""The rollout worker's side of the store: claim a group, append turns, publish what finished."""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

import redis.asyncio

from agent_r3.errors import ContractError
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
    encode_beat,
    encode_end,
    encode_group,
)
from agent_r3.trajectory import TurnRecord
from agent_r3.types import Ending, TrajectoryGroup, Turn

Reply = list[bytes]


class TrajectoryWriter:
    """One process's writer; every call is idempotent, so it is tried again for `retry_s` when the connection is lost.

        async with TrajectoryWriter.connect(url, "demo") as store:
            index = await store.claim_group("worker-0")            # None: nothing is asked for at the moment
            await store.open_trajectory("g0-1", "g0", task.id)
            await store.append_turn("g0-1", turn)                  # once a turn
            await store.finish_trajectory("g0-1", 1.0, Ending.FINISH, counters)
            await store.publish_group("worker-0", group, {"generate": 12.5})

    A process started again under the same worker name takes back what its dead predecessor had claimed; whatever the
    predecessor still held open is replaced. Raises StoreError when the server stays away,
    ContractError for a call that does not fit what is stored (never retried).
    """

    def __init__(self, client: redis.asyncio.Redis, run: str, *, retry_s: float) -> None:
        self._client = client
        self._keys = Keys(run)
        self._retry_s = retry_s
        self._incarnation = uuid.uuid4().hex
        self._last_event = b"0"

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, run: str, *, retry_s: float = 20.0) -> AsyncIterator["TrajectoryWriter"]:
        """A writer while the block lasts; one a process. Raises UserError when no server accepts us at `url`."""
        client = await connect_async(url)
        try:
            yield cls(client, run, retry_s=retry_s)
        finally:
            await client.aclose()

    async def open_trajectory(self, trajectory_id: str, group_id: str, task_id: str) -> None:
        """Start an empty trajectory. Raises ContractError when this process already has turns under that id."""
        keys = self._keys
        reply = await self._run(
            f"open {trajectory_id}",
            scripts.OPEN,
            (keys.trajectory(trajectory_id), keys.turns(trajectory_id), keys.members(group_id)),
            (self._incarnation, trajectory_id, group_id, task_id),
        )
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
        reply = await self._run(
            f"append turn {turn.index} to {trajectory_id}",
            scripts.APPEND,
            (self._keys.trajectory(trajectory_id), self._keys.turns(trajectory_id)),
            (self._incarnation, turn.index, record.start, record.stop, encode_record(record)),
        )
        self._require_held(reply, trajectory_id)
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
        reply = await self._run(
            f"finish {trajectory_id}",
            scripts.FINISH,
            (self._keys.trajectory(trajectory_id), self._keys.turns(trajectory_id)),
            (self._incarnation, encode_end(reward, ending, counters)),
        )
        self._require_held(reply, trajectory_id)
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

    async def claim_group(self, worker: str) -> int | None:
        """Index of the next group this worker shall sample, or None while the trainer asks for no more."""
        keys = self._keys
        # The token makes a repeated call return the claim whose answer was lost, instead of a second one.
        reply = await self._run(
            "claim a group",
            scripts.CLAIM,
            (keys.claims, keys.next, keys.demand),
            (worker, self._incarnation, uuid.uuid4().hex),
        )
        return None if reply[0] == b"none" else int(reply[1])

    async def publish_group(self, worker: str, group: TrajectoryGroup, seconds: Mapping[str, float]) -> None:
        """Hand a finished group to the trainer and release its claim, in one step.

        Trajectories opened for the group but not part of it are deleted. Raises ContractError when the claim is not
        this process's, or a trajectory is not finished or belongs elsewhere.
        """
        keys = self._keys
        reply = await self._run(
            f"publish group {group.index}",
            scripts.PUBLISH,
            (keys.claims, keys.published, keys.groups, keys.members(group.id)),
            (
                *(group.index, worker, self._incarnation, self._incarnation, group.id, encode_group(group)),
                *(dump(seconds), keys.trajectory(""), keys.turns("")),
                *group.trajectory_ids,
            ),
        )
        what = f"group {group.index} ({group.id}) of {worker}"
        if reply[0] == b"unclaimed":
            raise ContractError(f"{what}: it is not claimed; the run was reset, or the group was never claimed")
        if reply[0] == b"owner":
            raise ContractError(f"{what}: it is claimed by another process of {reply[1].decode()}")
        if reply[0] == b"foreign":
            raise ContractError(f"{what}: trajectory {reply[1].decode()} is not one of this group and process")
        if reply[0] == b"unfinished":
            raise ContractError(f"{what}: trajectory {reply[1].decode()} is not finished")

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
        """Tell that `role` is alive; `payload` is JSON for `status`."""
        beat = encode_beat(payload, time.time())
        await self._call("heartbeat", lambda client: client.hset(self._keys.roles, role, beat))

    async def roles(self) -> dict[str, RoleState]:
        """Roles that ever sent a heartbeat, with its age."""
        fields = await self._call("read roles", lambda client: client.hgetall(self._keys.roles))
        return decode_roles(cast(Mapping[bytes, bytes], fields), time.time())

    @staticmethod
    def _require_held(reply: Sequence[bytes], trajectory_id: str) -> None:
        if reply[0] == b"missing":
            raise ContractError(f"trajectory {trajectory_id} is not open: never opened, dropped, or the run was reset")
        if reply[0] == b"owner":
            raise ContractError(f"trajectory {trajectory_id} is held by another process")

    async def _run(self, what: str, script: str, keys: Sequence[str], args: Sequence[str | int | bytes]) -> Reply:
        async def call(client: redis.asyncio.Redis) -> object:
            return await client.register_script(script)(keys=list(keys), args=list(args))

        return cast(Reply, await self._call(what, call))

    async def _call(self, what: str, call: Callable[[redis.asyncio.Redis], Awaitable[object]]) -> object:
        try:
            async for attempt in retrying_async(self._retry_s):
                with attempt:
                    return await call(self._client)
        except FOREIGN as exc:
            raise lost(what, exc) from exc
        raise AssertionError("unreachable: the retrier returns or raises")

"""The store against both real servers: appends, claims, delivery, acknowledgement."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import redis

from agent_r3.errors import ContractError
from agent_r3.routing import rows_from
from agent_r3.store import GroupReader, Policy, TrajectoryWriter
from agent_r3.store.records import decode_record, encode_record
from agent_r3.trajectory import TurnRecord
from agent_r3.types import Ending, Routing, TrajectoryGroup, Turn
from tests.support.store import hold_group, make_turn, make_turns

COUNTERS: Mapping[str, int] = {"prompt_tokens": 90, "cached_tokens": 60, "reprefilled_tokens": 0}


async def put(store: TrajectoryWriter, name: str, turns: list[Turn], group: str = "g0", reward: float = 1.0) -> None:
    await store.open_trajectory(name, int(group[1:]), group, "task")
    for turn in turns:
        await store.append_turn(name, turn)
    await store.finish_trajectory(name, reward, Ending.FINISH, COUNTERS)


def group_of(index: int, names: tuple[str, ...] = (), version: int = 0) -> TrajectoryGroup:
    rewards = tuple(float(i) for i in range(len(names)))
    return TrajectoryGroup(f"g{index}", index, "task", version, names, rewards, {"sandbox": 2})


async def publish(store: TrajectoryWriter, worker: str, count: int = 2) -> TrajectoryGroup:
    """Claim, fill and publish one group."""
    index = await store.claim_group(worker)
    assert index is not None
    names = tuple(f"g{index}-{i}" for i in range(count))
    for name in names:
        await put(store, name, make_turns(np.random.default_rng(index), 3), group=f"g{index}")
    group = group_of(index, names)
    await store.publish_group(worker, group, {"generate": 1.5})
    return group


def start_run(url: str, demand: int) -> None:
    with GroupReader.connect(url, "run") as reader:
        reader.reset_position(0)
        reader.set_policy(0, "weights/0")
        reader.set_demand(demand)


async def test_a_trajectory_comes_back_as_its_turns_joined(store_url: str) -> None:
    turns = make_turns(np.random.default_rng(0), 5, version=3)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        await hold_group(store_url, store)
        await put(store, "t", turns, reward=0.5)
    with GroupReader.connect(store_url, "run") as reader:
        trajectory = reader.load("t")
    parts = [(turn.prompt_ids, turn.sampled_ids) for turn in turns]
    assert np.array_equal(trajectory.tokens, np.concatenate([ids for both in parts for ids in both]))
    mask = np.concatenate([np.full(len(ids), i, bool) for both in parts for i, ids in enumerate(both)])
    assert np.array_equal(trajectory.loss_mask, mask)
    assert np.array_equal(trajectory.logprobs[mask], np.concatenate([turn.logprobs for turn in turns]))
    assert not trajectory.logprobs[~mask].any()
    assert np.array_equal(trajectory.routing.experts, np.concatenate([turn.routing.experts for turn in turns]))
    assert len(trajectory.routing.experts) == len(trajectory.tokens) - 1
    assert set(trajectory.versions.tolist()) == {3}
    assert (trajectory.reward, trajectory.ending, trajectory.turns) == (0.5, Ending.FINISH, 5)
    assert (trajectory.prompt_tokens, trajectory.cached_tokens, trajectory.reprefilled_tokens) == (90, 60, 0)


async def test_appending_the_same_turn_again_changes_nothing(store_url: str) -> None:
    turns = make_turns(np.random.default_rng(0), 3)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        await hold_group(store_url, store)
        await store.open_trajectory("t", 0, "g", "task")
        await store.open_trajectory("t", 0, "g", "task")
        for turn in (turns[0], turns[0], turns[1], turns[0], turns[1], turns[2], turns[2]):
            await store.append_turn("t", turn)
        for _ in range(2):
            await store.finish_trajectory("t", 1.0, Ending.FINISH, COUNTERS)
        await store.append_turn("t", turns[1])
    with GroupReader.connect(store_url, "run") as reader:
        assert reader.load("t").turns == 3


async def test_another_turn_in_a_taken_place_is_refused(store_url: str) -> None:
    rng = np.random.default_rng(0)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        await hold_group(store_url, store)
        await store.open_trajectory("t", 0, "g", "task")
        await store.append_turn("t", make_turn(rng, 0, 0))
        with pytest.raises(ContractError, match=r"turn 0 at tokens 0\.\.6: another turn is already stored"):
            await store.append_turn("t", make_turn(rng, 0, 0))


@pytest.mark.parametrize(("index", "start"), [(2, 7), (1, 6), (1, 8), (2, 14)])
async def test_a_turn_that_leaves_a_gap_or_overlaps_is_refused(store_url: str, index: int, start: int) -> None:
    rng = np.random.default_rng(0)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        await hold_group(store_url, store)
        await store.open_trajectory("t", 0, "g", "task")
        await store.append_turn("t", make_turn(rng, 0, 0))
        with pytest.raises(ContractError, match=r"does not continue what is stored \(1 turns, 7 tokens are stored\)"):
            await store.append_turn("t", make_turn(rng, index, start))
        await store.append_turn("t", make_turn(rng, 1, 7))


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": np.zeros(2, np.float32)},
        {"logprobs": np.array([-1, np.nan, -1], np.float32)},
        {"sampled_ids": np.zeros(0, np.int32)},
        {"sampled_ids": np.array([1, -2, 3], np.int32)},
    ],
)
async def test_arrays_that_do_not_fit_together_never_reach_the_store(store_url: str, change: dict[str, object]) -> None:
    turn = make_turn(np.random.default_rng(0), 0, 0)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        await hold_group(store_url, store)
        await store.open_trajectory("t", 0, "g", "task")
        with pytest.raises(ContractError, match="turn 0"):
            await store.append_turn("t", replace(turn, **change))  # type: ignore[arg-type]
        await store.append_turn("t", turn)


@pytest.mark.parametrize("shift", [(0, -1), (0, 1), (-1, 0), (1, 0)])
def test_rows_before_or_beyond_the_turn_are_refused(shift: tuple[int, int]) -> None:
    turn = make_turn(np.random.default_rng(0), 1, 10)
    first, stop = turn.routing.start + shift[0], turn.routing.stop + shift[1]
    experts = np.resize(turn.routing.experts, (stop - first, *turn.routing.experts.shape[1:]))
    with pytest.raises(ContractError, match=r"need rows 9\.\.15, got"):
        TurnRecord.of(replace(turn, routing=Routing(first, experts)))


def test_a_record_survives_the_codec_and_damage_does_not_pass() -> None:
    record = TurnRecord.of(make_turn(np.random.default_rng(0), 2, 40, version=9))
    data = encode_record(record)
    back = decode_record(data)
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        assert np.array_equal(getattr(back, name), getattr(record, name))
    assert np.array_equal(back.routing.experts, record.routing.experts)
    assert (back.index, back.start, back.cached_tokens, back.routing.start) == (2, 40, rows_from(40), 39)
    for place in range(0, len(data), 7):
        broken = bytearray(data)
        broken[place] ^= 0x10
        with pytest.raises(ContractError):
            decode_record(bytes(broken))
    for cut in (0, 10, 60, len(data) - 1):
        with pytest.raises(ContractError):
            decode_record(data[:cut])


async def test_the_reader_refuses_absent_unfinished_and_tampered_trajectories(store_url: str) -> None:
    rng = np.random.default_rng(0)
    first, second = make_turn(rng, 0, 0), make_turn(rng, 1, 7)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        await hold_group(store_url, store)
        await store.open_trajectory("open", 0, "g", "task")
        await store.append_turn("open", first)
        for name in ("lost", "gap"):
            await put(store, name, [first, second])
    raw = redis.Redis.from_url(store_url)
    raw.rpop("agent_r3:{run}:turns:lost")
    raw.lpop("agent_r3:{run}:turns:gap")
    with GroupReader.connect(store_url, "run") as reader:
        with pytest.raises(ContractError, match="nowhere is not there"):
            reader.load("nowhere")
        with pytest.raises(ContractError, match="open is unfinished with 1 turns"):
            reader.load("open")
        with pytest.raises(ContractError, match="7 tokens in 1 turns, but 14 were appended"):
            reader.load("lost")
        with pytest.raises(ContractError, match="turn 0 at token 0 expected, got turn 1 at token 7"):
            reader.load("gap")
    raw.close()


async def test_calls_on_what_is_not_held_are_refused(store_url: str) -> None:
    turn = make_turn(np.random.default_rng(0), 0, 0)
    async with (
        TrajectoryWriter.connect(store_url, "run") as store,
        TrajectoryWriter.connect(store_url, "run") as other,
    ):
        await hold_group(store_url, store)
        with pytest.raises(ContractError, match="t is not open"):
            await store.append_turn("t", turn)
        with pytest.raises(ContractError, match="t is not open"):
            await store.finish_trajectory("t", 1.0, Ending.FINISH, COUNTERS)
        await store.open_trajectory("t", 0, "g", "task")
        with pytest.raises(ContractError, match="t has no turn"):
            await store.finish_trajectory("t", 1.0, Ending.FINISH, COUNTERS)
        with pytest.raises(ContractError, match="held by another process"):
            await other.append_turn("t", turn)
        await other.drop_trajectory("t")
        await store.append_turn("t", turn)
        with pytest.raises(ContractError, match="already open for group g, task task with 7 tokens"):
            await store.open_trajectory("t", 0, "g", "task")
        with pytest.raises(ContractError, match="counters must be exactly"):
            await store.finish_trajectory("t", 1.0, Ending.FINISH, {"prompt_tokens": 1})
        await store.finish_trajectory("t", 1.0, Ending.FINISH, COUNTERS)
        with pytest.raises(ContractError, match="has already ended"):
            await store.finish_trajectory("t", 0.0, Ending.FINISH, COUNTERS)
        with pytest.raises(ContractError, match="the trajectory has ended"):
            await store.append_turn("t", make_turn(np.random.default_rng(1), 1, 7))


async def test_no_group_is_claimed_beyond_the_demand_or_twice(store_url: str) -> None:
    start_run(store_url, 40)

    async def work(name: str) -> list[int]:
        async with TrajectoryWriter.connect(store_url, "run") as store:
            claimed = []
            while (index := await store.claim_group(name)) is not None:
                claimed.append(index)
                await asyncio.sleep(0)
            return claimed

    claimed = await asyncio.gather(*(work(f"worker-{i}") for i in range(12)))
    assert sorted(index for one in claimed for index in one) == list(range(40))
    assert sum(bool(one) for one in claimed) > 1


async def test_hundreds_of_episodes_append_at_the_same_time(store_url: str) -> None:
    turn = make_turn(np.random.default_rng(0), 0, 0)

    async def episode(store: TrajectoryWriter, name: str) -> None:
        await store.open_trajectory(name, 0, "g", "task")
        await store.append_turn(name, turn)

    async with TrajectoryWriter.connect(store_url, "run", retry_s=0) as store:
        await hold_group(store_url, store)
        await asyncio.gather(*(episode(store, f"t{i}") for i in range(300)))


async def test_a_restarted_worker_first_gets_its_own_claims_back(store_url: str) -> None:
    start_run(store_url, 4)
    turn = make_turn(np.random.default_rng(0), 0, 0)
    async with (
        TrajectoryWriter.connect(store_url, "run") as dead,
        TrajectoryWriter.connect(store_url, "run") as other,
    ):
        assert [await dead.claim_group("a"), await other.claim_group("b"), await dead.claim_group("a")] == [0, 1, 2]
        await dead.open_trajectory("g0-0", 0, "g0", "task")
        await dead.append_turn("g0-0", turn)
        async with TrajectoryWriter.connect(store_url, "run") as again:
            assert [await again.claim_group("a") for _ in range(4)] == [0, 2, 3, None]
            await put(again, "g0-0", [turn])  # replaces what the dead process had open
            with pytest.raises(ContractError, match="claimed by another process of a"):
                await dead.publish_group("a", group_of(0), {})
            await again.publish_group("a", group_of(0, ("g0-0",)), {})


async def test_publishing_twice_delivers_once_and_needs_the_claim(store_url: str) -> None:
    start_run(store_url, 2)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        with pytest.raises(ContractError, match=r"group 0 \(g0\) of w: it is not claimed"):
            await store.publish_group("w", group_of(0), {})
        group = await publish(store, "w")
        await store.publish_group("w", group, {"generate": 1.5})
        with GroupReader.connect(store_url, "run") as reader:
            delivered = reader.read(5, 1)
            assert [delivery.group for delivery in delivered] == [group]
            assert delivered[0].seconds == {"generate": 1.5}
            assert reader.read(5, 0.05) == []


async def test_a_group_holds_only_its_own_finished_trajectories(store_url: str) -> None:
    start_run(store_url, 2)
    turns = make_turns(np.random.default_rng(0), 2)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        assert [await store.claim_group("w") for _ in range(2)] == [0, 1]
        await put(store, "elsewhere", turns, group="g1")
        await store.open_trajectory("half", 0, "g0", "task")
        await store.append_turn("half", turns[0])
        for name, problem in (("elsewhere", "not one of this group"), ("half", "not finished"), ("no", "not one of")):
            with pytest.raises(ContractError, match=f"trajectory {name} is {problem}"):
                await store.publish_group("w", group_of(0, (name,)), {})
        await put(store, "whole", turns)
        await store.publish_group("w", group_of(0, ("whole",)), {})
        with GroupReader.connect(store_url, "run") as reader:
            reader.load("elsewhere")
            with pytest.raises(ContractError, match="half is not there"):
                reader.load("half")


async def test_a_restarted_reader_gets_what_was_not_acknowledged_first(store_url: str) -> None:
    start_run(store_url, 10)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        for _ in range(5):
            await publish(store, "w")
        with GroupReader.connect(store_url, "run") as reader:
            first = reader.read(2, 1)
            second = reader.read(2, 1)
            assert [d.group.index for d in first + second] == [0, 1, 2, 3]
            reader.ack(first)
            reader.ack(first)
        with GroupReader.connect(store_url, "run") as reader:
            assert [d.group.index for d in reader.read(1, 1)] == [2]
            assert [d.group.index for d in reader.read(9, 1)] == [3]
            assert [d.group.index for d in reader.read(9, 1)] == [4]
            assert reader.read(9, 0.05) == []
            assert reader.load("g2-1").turns == 3


async def test_acknowledged_groups_leave_nothing_behind(store_url: str) -> None:
    start_run(store_url, 3)
    raw = redis.Redis.from_url(store_url)
    before = set(raw.keys())
    async with TrajectoryWriter.connect(store_url, "run") as store:
        await publish(store, "w")
        with GroupReader.connect(store_url, "run") as reader:
            reader.ack(reader.read(1, 1))
        assert set(raw.keys()) - before <= {b"agent_r3:{run}:" + name for name in (b"published", b"next")}
        assert raw.xlen("agent_r3:{run}:groups") == 0
        with GroupReader.connect(store_url, "run") as reader:
            assert reader.read(1, 0.05) == []
    raw.close()


async def test_a_reset_drops_claims_groups_and_trajectories_and_goes_on_at_its_index(store_url: str) -> None:
    start_run(store_url, 10)
    async with TrajectoryWriter.connect(store_url, "run") as store, TrajectoryWriter.connect(store_url, "ru") as other:
        await hold_group(store_url, other, run="ru")
        await other.open_trajectory("kept", 0, "g", "task")
        await publish(store, "w")
        stale = await store.claim_group("w")
        with GroupReader.connect(store_url, "run") as reader:
            reader.read(1, 1)
            reader.reset_position(6)
            assert await store.claim_group("w") is None
            with pytest.raises(ContractError, match="not there"):
                reader.load("g0-0")
            assert stale == 1
            with pytest.raises(ContractError, match="not claimed"):
                await store.publish_group("w", group_of(1), {})
            reader.set_demand(7)
            assert (await publish(store, "w")).index == 6
            assert [d.group.index for d in reader.read(5, 1)] == [6]
        await other.append_turn("kept", make_turn(np.random.default_rng(0), 0, 0))


async def test_waiting_workers_wake_when_policy_or_demand_change(store_url: str) -> None:
    start_run(store_url, 0)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        assert await store.wait_for_work(5)  # what happened before the first call
        assert not await store.wait_for_work(0.05)
        with GroupReader.connect(store_url, "run") as reader:
            for change in (lambda: reader.set_demand(1), lambda: reader.set_policy(1, "weights/1")):
                waiting = asyncio.create_task(store.wait_for_work(10))
                await asyncio.sleep(0.05)
                began = time.monotonic()
                await asyncio.to_thread(change)
                assert await waiting
                assert time.monotonic() - began < 1
            assert await store.policy() == reader.policy() == Policy(1, "weights/1")


async def test_no_policy_is_an_error_and_runs_are_apart(store_url: str) -> None:
    start_run(store_url, 1)
    async with TrajectoryWriter.connect(store_url, "another") as store:
        with pytest.raises(ContractError, match="no policy is set"):
            await store.policy()
        assert await store.claim_group("w") is None


async def test_heartbeats_tell_age_and_payload(store_url: str) -> None:
    async with TrajectoryWriter.connect(store_url, "run") as store:
        await store.heartbeat("rollout/w", {"episodes": 3})
        with GroupReader.connect(store_url, "run") as reader:
            reader.heartbeat("trainer", {"step": 2})
            roles = reader.roles()
        assert (await store.roles()).keys() == roles.keys() == {"rollout/w", "trainer"}
    assert roles["rollout/w"].payload == {"episodes": 3}
    assert 0 <= roles["trainer"].age_s < 5


def test_reading_an_empty_stream_waits_as_long_as_asked(store_url: str) -> None:
    with GroupReader.connect(store_url, "run") as reader:
        began = time.monotonic()
        assert reader.read(1, 0.3) == []
        assert 0.25 < time.monotonic() - began < 2

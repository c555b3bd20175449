"""Claims of workers that died, stopped, paused or lost an answer: every group is published once, by who holds it."""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any, cast

import numpy as np
import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from agent_r3.errors import ClaimLostError, ContractError, StoreError
from agent_r3.store import GroupReader, TrajectoryWriter
from agent_r3.types import Ending, TrajectoryGroup
from tests.support.store import Clock, LossyProxy, RedisServer, clock_of, make_turns

COUNTERS: Mapping[str, int] = {"prompt_tokens": 9, "cached_tokens": 6, "reprefilled_tokens": 0}
TURNS = make_turns(np.random.default_rng(0), 2)


def group_of(index: int, *names: str) -> TrajectoryGroup:
    return TrajectoryGroup(f"g{index}", index, "task", 0, names, tuple(1.0 for _ in names))


def ask(url: str, demand: int) -> None:
    with GroupReader.connect(url, "run") as reader:
        reader.set_policy(0, "weights")
        reader.set_demand(demand)


def delivered(url: str) -> list[int]:
    """Indices of the groups that the trainer gets; their trajectories are whole."""
    with GroupReader.connect(url, "run") as reader:
        deliveries = reader.read(100, 0.05)
        for delivery in deliveries:
            for name in delivery.group.trajectory_ids:
                assert reader.load(name).turns == len(TURNS)
    return sorted(delivery.group.index for delivery in deliveries)


async def fill(store: TrajectoryWriter, index: int, name: str) -> None:
    """A whole trajectory."""
    await store.open_trajectory(name, index, f"g{index}", "task")
    for turn in TURNS:
        await store.append_turn(name, turn)
    await store.finish_trajectory(name, 1.0, Ending.FINISH, COUNTERS)


async def lost(call: Awaitable[object], why: str) -> None:
    with pytest.raises(ClaimLostError, match=why):
        await call


async def writers(stack: AsyncExitStack, url: str, count: int) -> list[TrajectoryWriter]:
    return [await stack.enter_async_context(TrajectoryWriter.connect(url, "run")) for _ in range(count)]


async def test_a_silent_workers_group_goes_to_another_and_its_own_calls_are_refused(store_url: str) -> None:
    ask(store_url, 1)
    async with AsyncExitStack() as stack:
        a, b = await writers(stack, store_url, 2)
        assert await a.claim_group("a") == 0
        await fill(a, 0, "g0-0")
        await a.open_trajectory("g0-1", 0, "g0", "task")
        await a.append_turn("g0-1", TURNS[0])
        assert await b.claim_group("b") is None
        with clock_of(store_url) as clock:
            clock.age_claim(0, 31)
            assert await b.claim_group("b") == 0
            assert not clock.client.keys("agent_r3:{run}:t*:g0-*"), "what the former holder had opened is gone"
        why = r"group 0.*: it is claimed by another process of b$"
        await lost(a.append_turn("g0-1", TURNS[1]), why)
        await lost(a.finish_trajectory("g0-1", 1.0, Ending.FINISH, COUNTERS), why)
        await lost(a.open_trajectory("g0-2", 0, "g0", "task"), why)
        await lost(a.publish_group("a", group_of(0, "g0-0"), {}), why)
        await fill(b, 0, "g0-1")
        await lost(a.append_turn("g0-1", TURNS[1]), why)
        await b.publish_group("b", group_of(0, "g0-1"), {})
        why = r"group 0.*: it was published by b$"
        await lost(a.open_trajectory("g0-1", 0, "g0", "task"), why)
        await lost(a.append_turn("g0-1", TURNS[1]), why)
        await lost(a.publish_group("a", group_of(0, "g0-0"), {}), why)
        await a.drop_trajectory("g0-1")  # as its holder would; it is b's
        await b.publish_group("b", group_of(0, "g0-1"), {})
    assert delivered(store_url) == [0]


@pytest.mark.parametrize(
    ("claim_age", "beat_age", "taken"),
    [(29, None, False), (31, None, True), (99, 29, False), (99, 31, True), (1, 99, False)],
)
async def test_a_worker_is_silent_when_neither_its_claim_nor_its_heartbeat_is_recent(
    store_url: str, claim_age: float, beat_age: float | None, taken: bool
) -> None:
    ask(store_url, 1)
    async with AsyncExitStack() as stack:
        a, b = await writers(stack, store_url, 2)
        assert await a.claim_group("a") == 0
        with clock_of(store_url) as clock:
            clock.age_claim(0, claim_age)
            if beat_age is not None:
                await a.heartbeat("worker/a", {"state": "running"})
                clock.age_heartbeat("a", beat_age)
        assert await b.claim_group("b") == (0 if taken else None)


async def test_how_long_is_too_long_is_the_callers_choice(store_url: str) -> None:
    ask(store_url, 1)
    async with AsyncExitStack() as stack:
        a, b = await writers(stack, store_url, 2)
        assert await a.claim_group("a") == 0
        with clock_of(store_url) as clock:
            clock.age_claim(0, 3)
        assert await b.claim_group("b", stale_s=10) is None
        assert await b.claim_group("b", stale_s=2) == 0


async def test_a_worker_that_says_it_has_stopped_is_not_waited_for(store_url: str) -> None:
    ask(store_url, 2)
    async with AsyncExitStack() as stack:
        a, b, again = await writers(stack, store_url, 3)
        await a.heartbeat("worker/a", {"state": "stopped"})
        assert await a.claim_group("a") == 0, "it claims after it said so: it was started again"
        assert [await b.claim_group("b"), await b.claim_group("b")] == [1, None]
        await a.heartbeat("worker/a", {"state": "stopped"})
        assert await b.claim_group("b") == 0
        assert await again.claim_group("a") is None


async def test_the_lowest_free_index_comes_first(store_url: str) -> None:
    ask(store_url, 7)
    async with AsyncExitStack() as stack:
        dead, gone, own, b = await writers(stack, store_url, 4)
        order = [(dead, "dead"), (own, "b"), (gone, "gone"), (own, "b"), (dead, "dead")]
        assert [await store.claim_group(name) for store, name in order] == [0, 1, 2, 3, 4]
        with clock_of(store_url) as clock:
            for index in (4, 2):
                clock.age_claim(index, 31)
        assert [await b.claim_group("b") for _ in range(7)] == [1, 2, 3, 4, 5, 6, None]


async def test_published_trajectories_outlive_whatever_becomes_of_the_claims(store_url: str) -> None:
    ask(store_url, 2)
    async with AsyncExitStack() as stack:
        a, b = await writers(stack, store_url, 2)
        for index in range(2):
            assert await a.claim_group("a") == index
            await fill(a, index, f"g{index}-0")
        await a.publish_group("a", group_of(0, "g0-0"), {})
        with clock_of(store_url) as clock:
            clock.age_claim(1, 31)
        assert await b.claim_group("b") == 1
        assert await b.claim_group("b") is None
    assert delivered(store_url) == [0]


async def test_a_reset_run_takes_every_claim_back(store_url: str) -> None:
    ask(store_url, 1)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        assert await store.claim_group("a") == 0
        await store.open_trajectory("g0-0", 0, "g0", "task")
        with GroupReader.connect(store_url, "run") as reader:
            reader.reset_position(0)
        why = r"group 0.*: it is not claimed; the run was reset"
        await lost(store.append_turn("g0-0", TURNS[0]), why)
        await lost(store.open_trajectory("g0-1", 0, "g0", "task"), why)
        await lost(store.publish_group("a", group_of(0), {}), why)
        ask(store_url, 1)
        assert await store.claim_group("a") == 0
        await fill(store, 0, "g0-0")
        await store.publish_group("a", group_of(0, "g0-0"), {})
    assert delivered(store_url) == [0]


async def test_one_process_may_ask_for_several_groups_at_the_same_time(store_url: str) -> None:
    ask(store_url, 20)
    async with TrajectoryWriter.connect(store_url, "run") as store:
        claimed = await asyncio.gather(*(store.claim_group("a") for _ in range(20)))
    assert sorted(index for index in claimed if index is not None) == list(range(20))


@pytest.mark.redis
async def test_a_claim_whose_answer_was_given_up_is_given_again_to_the_same_process(redis_server: RedisServer) -> None:
    ask(redis_server.url, 2)
    proxy = LossyProxy(redis_server.port)
    async with TrajectoryWriter.connect(proxy.url, "run", retry_s=0) as store:
        assert await store.claim_group("a") == 0
        proxy.swallow = 1
        with pytest.raises(StoreError):
            await store.claim_group("a")
        assert await store.claim_group("a") == 1
        assert await store.claim_group("a") is None
    proxy.close()


@pytest.mark.redis
async def test_a_lost_claim_may_come_back_in_an_answer_that_is_given_up(redis_server: RedisServer) -> None:
    ask(redis_server.url, 1)
    proxy = LossyProxy(redis_server.port)
    async with TrajectoryWriter.connect(proxy.url, "run", retry_s=0) as a, AsyncExitStack() as stack:
        (b,) = await writers(stack, redis_server.url, 1)
        assert await a.claim_group("a") == 0
        with clock_of(redis_server.url) as clock:
            clock.age_claim(0, 31)
            assert await b.claim_group("b") == 0
            await lost(a.open_trajectory("g0-0", 0, "g0", "task"), "another process of b")
            clock.age_claim(0, 31)
        proxy.swallow = 1
        with pytest.raises(StoreError):
            await a.claim_group("a")
        assert await a.claim_group("a") == 0
    proxy.close()


@pytest.mark.redis
async def test_a_full_server_is_waited_for(redis_server: RedisServer) -> None:
    ask(redis_server.url, 1)
    with clock_of(redis_server.url) as clock:
        async with TrajectoryWriter.connect(redis_server.url, "run", retry_s=60) as store:
            assert await store.claim_group("a") == 0
            await store.open_trajectory("g0-0", 0, "g0", "task")
            clock.client.config_set("maxmemory", "1")
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                clock.client.set("x", "y")
            append = asyncio.create_task(store.append_turn("g0-0", TURNS[0]))
            refused = {"errorstat_OOM": {"count": 0}}
            while refused["errorstat_OOM"]["count"] < 3:  # the test's own, and two of the writer
                assert not append.done()
                refused = cast(Any, await asyncio.to_thread(clock.client.info, "errorstats"))
            clock.client.config_set("maxmemory", "0")
            await append
            await store.append_turn("g0-0", TURNS[1])
            await store.finish_trajectory("g0-0", 1.0, Ending.FINISH, COUNTERS)
            await store.publish_group("a", group_of(0, "g0-0"), {})
    assert delivered(redis_server.url) == [0]


PROCESSES = st.sampled_from(["a1", "a2", "b1", "c1"])  # worker a was started again; all of them may still be there


class ClaimMachine(RuleBasedStateMachine):
    """The model: who holds each claimed group, which groups are published by whom, and which workers are silent."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis.from_url(self.url)
        self.client.flushall()
        self.clock = Clock(self.client)
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        names = ["a1", "a2", "b1", "c1"]
        stores = self.runner.run(writers(self.stack, self.url, len(names)))
        self.stores = dict(zip(names, stores, strict=True))
        self.demand = self.next = 0
        self.held: dict[int, str] = {}  # group -> process
        self.aged: set[int] = set()  # claims whose worker is silent
        self.working: set[tuple[str, int]] = set()  # groups that a process believes to hold
        self.published: dict[int, str] = {}
        self.whole: set[tuple[str, int]] = set()  # trajectory finished under the present claim
        ask(self.url, 0)

    @rule(more=st.integers(1, 3))
    def ask_for_more(self, more: int) -> None:
        self.demand += more
        ask(self.url, self.demand)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fall_silent(self, data: st.DataObject) -> None:
        """One claim of a worker without heartbeat grows old."""
        index = data.draw(st.sampled_from(sorted(self.held)))
        if index not in self.aged:
            self.clock.age_claim(index, 31)
        self.aged.add(index)

    @rule(process=PROCESSES)
    def claim(self, process: str) -> None:
        free = [
            index
            for index, holder in self.held.items()
            if (holder != process if holder[0] == process[0] else index in self.aged)
        ]
        expected = min(free) if free else self.next if self.next < self.demand else None
        assert self.runner.run(self.stores[process].claim_group(process[0])) == expected
        if expected is None:
            return
        self.next = max(self.next, expected + 1)
        self.held[expected] = process
        self.working.add((process, expected))
        self.aged.discard(expected)
        self.whole = {(who, index) for who, index in self.whole if index != expected}

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def run_an_episode(self, data: st.DataObject) -> None:
        process, index = data.draw(st.sampled_from(sorted(self.working)))
        call = fill(self.stores[process], index, f"g{index}-0")
        if self.held.get(index) != process:
            self.runner.run(lost(call, self.why(index)))
        elif (process, index) not in self.whole:
            self.runner.run(call)
            self.whole.add((process, index))
        else:
            call.close()

    @precondition(lambda self: self.working)
    @rule(data=st.data(), repeats=st.integers(1, 2))
    def publish(self, data: st.DataObject, repeats: int) -> None:
        process, index = data.draw(st.sampled_from(sorted(self.working)))
        store, group = self.stores[process], group_of(index, f"g{index}-0")
        for _ in range(repeats):
            call = store.publish_group(process[0], group, {})
            if self.held.get(index) == process and (process, index) not in self.whole:
                with pytest.raises(ContractError, match="not one of this group"):
                    self.runner.run(call)
            elif self.held.get(index) == process or self.published.get(index) == process:
                self.runner.run(call)
                self.published[index] = process
                self.held.pop(index, None)
            else:
                self.runner.run(lost(call, self.why(index)))

    def why(self, index: int) -> str:
        holder = self.held.get(index)
        return f"claimed by another process of {holder[0]}" if holder else f"published by {self.published[index][0]}"

    @invariant()
    def every_published_group_is_there_once(self) -> None:
        entries = cast(list[tuple[bytes, dict[bytes, bytes]]], self.client.xrange("agent_r3:{run}:groups"))
        assert sorted(json.loads(fields[b"group"])["index"] for _, fields in entries) == sorted(self.published)
        assert self.client.hlen("agent_r3:{run}:claims") == len(self.held)
        assert set(range(self.next)) == self.held.keys() | self.published.keys()

    def teardown(self) -> None:
        assert delivered(self.url) == sorted(self.published)
        self.runner.run(self.stack.aclose())
        self.runner.close()
        self.client.close()


def test_any_order_of_claims_silences_and_publications_gives_every_group_once(store_url: str) -> None:
    machine = type("Machine", (ClaimMachine,), {"url": store_url})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))

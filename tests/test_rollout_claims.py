"""Rollout worker processes that are paused, killed or lose their store: every group is published once all the same."""

import asyncio
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r3.errors import StoreError
from agent_r3.rollout.worker import RolloutWorker
from agent_r3.store import EmbeddedServer, GroupReader, TrajectoryWriter
from agent_r3.types import Ending, TrajectoryGroup, Turn
from tests.support.broker import MemoryGrader, MemoryProvider
from tests.support.docker import make_task
from tests.support.engine import save_tokenizer
from tests.support.rollout_process import HeldFleet, Workers, config_of, workers_of
from tests.support.store import RedisServer, clock_of, make_turns

RUN = "claims"
COUNTERS = {"prompt_tokens": 9, "cached_tokens": 6, "reprefilled_tokens": 0}


@pytest.fixture
def server_url(tmp_path: Path) -> Iterator[str]:
    with EmbeddedServer(tmp_path / "store") as server:
        yield server.url


def collect(reader: GroupReader, workers: Workers, count: int) -> list[TrajectoryGroup]:
    """Groups as they come until there are `count` and no more; each with two whole episodes of three turns."""
    groups: list[TrajectoryGroup] = []

    def enough() -> bool:
        groups.extend(delivery.group for delivery in reader.read(count, 0.1))
        return len(groups) >= count

    workers.until(enough)
    groups += [delivery.group for delivery in reader.read(count, 0.2)]
    for group in groups:
        assert [reader.load(name).turns for name in group.trajectory_ids] == [3, 3], group
    return groups


def lost(reader: GroupReader, worker: str) -> int:
    """Claims that the worker has lost, by its heartbeat."""
    role = reader.roles().get(f"worker/{worker}")
    failures = role.payload["failures"] if role else {}
    assert isinstance(failures, dict)
    return int(failures.get("claim_lost", 0))


def test_a_worker_that_was_paused_gives_its_group_up_and_goes_on_with_others(server_url: str, tmp_path: Path) -> None:
    with workers_of(tmp_path, server_url, RUN) as workers, GroupReader.connect(server_url, RUN) as reader:
        reader.set_policy(0, "weights")
        workers.start("a", "b")
        workers.hold("a")
        workers.signal("b", signal.SIGSTOP)
        reader.set_demand(1)
        workers.wait_for("a", "held", 2)
        workers.signal("a", signal.SIGSTOP)
        workers.signal("b", signal.SIGCONT)
        workers.wait_for("b", "published")
        assert workers.events("b", "claimed") == workers.events("a", "claimed") == [0]
        workers.hold("b")
        reader.set_demand(6)
        workers.wait_for("b", "held", 2)
        workers.release("a")
        workers.signal("a", signal.SIGCONT)
        workers.wait_for("a", "published", 4)
        workers.release("b")
        groups = collect(reader, workers, 6)
        assert sorted(group.index for group in groups) == [0, 1, 2, 3, 4, 5]
        assert workers.events("b", "published") == [0, 1]
        workers.until(lambda: lost(reader, "a") == 1)
        assert lost(reader, "b") == 0
        assert workers.stop() == {"a": 0, "b": 0}


def test_two_workers_share_the_groups_and_one_that_is_killed_for_good_leaves_no_gap(
    server_url: str, tmp_path: Path
) -> None:
    with workers_of(tmp_path, server_url, RUN) as workers, GroupReader.connect(server_url, RUN) as reader:
        reader.set_policy(0, "weights")
        workers.start("a", "b")
        workers.hold("a", "b")
        reader.set_demand(2)
        for name in ("a", "b"):
            workers.wait_for(name, "held", 2)
        workers.release("a")
        workers.wait_for("a", "published")
        workers.hold("a")
        reader.set_demand(8)
        workers.wait_for("a", "held", 4)
        workers.kill("a")
        workers.release("b")
        groups = collect(reader, workers, 8)
        assert sorted(group.index for group in groups) == list(range(8))
        (of_a,) = workers.events("a", "published")
        assert sorted([of_a, *workers.events("b", "published")]) == list(range(8))
        assert workers.events("a", "claimed")[1] in workers.events("b", "claimed"), "what the dead worker had held"


async def test_a_lost_claim_that_comes_back_starts_its_group_anew(server_url: str, tmp_path: Path) -> None:
    """The worker has not noticed the loss: its model has not answered since."""
    save_tokenizer(tmp_path)
    hold, held = tmp_path / "hold-a", asyncio.Semaphore(0)
    hold.touch()
    fleet: Any = HeldFleet(tmp_path, "a", lambda what, index: held.release())
    provider = MemoryProvider()
    config = config_of(tmp_path, server_url, RUN, concurrency=4)
    with GroupReader.connect(server_url, RUN) as reader, clock_of(server_url, RUN) as clock:
        reader.set_policy(0, "weights")
        reader.set_demand(1)
        async with (
            TrajectoryWriter.connect(server_url, RUN) as store,
            TrajectoryWriter.connect(server_url, RUN) as other,
        ):
            worker = RolloutWorker(
                *("a", config, [make_task("image")], fleet.renderer, fleet, provider, MemoryGrader(), store)
            )
            running = asyncio.create_task(worker.run())
            for _ in range(2):
                await held.acquire()
            clock.age_claim(0, 31)
            assert await other.claim_group("b") == 0
            clock.age_claim(0, 31)
            reader.set_demand(1)  # wakes the worker
            for _ in range(2):
                await held.acquire()
            assert [sandbox.closed for sandbox in provider.sandboxes] == [True, True, False, False]
            hold.unlink()
            (delivery,) = await asyncio.to_thread(reader.read, 1, 60)
            assert [reader.load(name).turns for name in delivery.group.trajectory_ids] == [3, 3]
            assert not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.mark.redis
def test_a_worker_keeps_its_episodes_until_a_killed_store_is_back(redis_server: RedisServer, tmp_path: Path) -> None:
    with workers_of(tmp_path, redis_server.url, RUN) as workers:
        with GroupReader.connect(redis_server.url, RUN) as reader:
            reader.set_policy(0, "weights")
            reader.set_demand(2)
        workers.hold("a")
        workers.start("a")
        workers.wait_for("a", "held", 2)
        redis_server.kill()
        workers.release("a")
        workers.until(lambda: b"waiting for the store" in workers.log("a").read_bytes())
        redis_server.start()
        with GroupReader.connect(redis_server.url, RUN) as reader:
            assert sorted(group.index for group in collect(reader, workers, 2)) == [0, 1]
            assert lost(reader, "a") == 0
        assert workers.events("a", "claimed") == [0, 1]
        assert workers.stop() == {"a": 0}


@pytest.mark.redis
def test_a_worker_whose_store_came_back_empty_drops_its_groups_and_takes_up_the_new_run(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with workers_of(tmp_path, redis_server.url, RUN) as workers:
        with GroupReader.connect(redis_server.url, RUN) as reader:
            reader.set_policy(0, "weights")
            reader.set_demand(1)
        workers.hold("a")
        workers.start("a")
        workers.wait_for("a", "held", 2)
        redis_server.kill()
        redis_server.forget()
        redis_server.start()
        with GroupReader.connect(redis_server.url, RUN) as reader:
            reader.reset_position(4)
            reader.set_policy(0, "weights")
            workers.release("a")
            workers.until(lambda: lost(reader, "a") == 1)
            reader.set_demand(6)
            assert sorted(group.index for group in collect(reader, workers, 2)) == [4, 5]
        assert workers.stop() == {"a": 0}


@pytest.mark.redis
async def test_what_a_killed_redis_had_answered_is_there_when_it_is_back(redis_server: RedisServer) -> None:
    answered: defaultdict[str, int] = defaultdict(int)
    episodes = {f"g{group}-{sample}": group for group in range(4) for sample in range(3)}
    turns = {name: make_turns(np.random.default_rng(place), 40) for place, name in enumerate(episodes)}
    with GroupReader.connect(redis_server.url, RUN) as reader:
        reader.set_demand(4)

    async def append(store: TrajectoryWriter, name: str, stop: asyncio.Event, until: int) -> None:
        """Turns until the server is gone; the `until`th answer of all kills it, while others are being given."""
        for turn in turns[name][answered[name] :]:
            try:
                await store.append_turn(name, turn)
            except StoreError:
                return
            answered[name] += 1
            if sum(answered.values()) >= until and not stop.is_set():
                stop.set()
                redis_server.kill()

    writers = [TrajectoryWriter.connect(redis_server.url, RUN, retry_s=0) for _ in range(4)]
    stores = [await writer.__aenter__() for writer in writers]
    for group, store in enumerate(stores):
        assert await store.claim_group(f"w{group}") == group
        for name in (name for name in episodes if episodes[name] == group):
            await store.open_trajectory(name, group, f"g{group}", "task")
    for until in (100, 230, 360):
        stop = asyncio.Event()
        await asyncio.gather(*(append(stores[group], name, stop, until) for name, group in episodes.items()))
        assert stop.is_set()
        await asyncio.to_thread(redis_server.start)
        for name in episodes:
            stored = await length(redis_server, name)
            assert answered[name] <= stored <= answered[name] + 1, "one may have been carried out and not answered"
    await asyncio.gather(*(finish(stores[group], name, turns[name]) for name, group in episodes.items()))
    for group, store in enumerate(stores):
        names = tuple(name for name in episodes if episodes[name] == group)
        await store.publish_group(f"w{group}", TrajectoryGroup(f"g{group}", group, "t", 0, names, (1.0,) * 3), {})
    redis_server.kill()
    await asyncio.to_thread(redis_server.start)
    with GroupReader.connect(redis_server.url, RUN) as reader:
        assert [delivery.group.index for delivery in reader.read(9, 1)] == [0, 1, 2, 3]
        for name in episodes:
            ids = [part for turn in turns[name] for part in (turn.prompt_ids, turn.sampled_ids)]
            assert np.array_equal(reader.load(name).tokens, np.concatenate(ids))
    for writer in writers:
        await writer.__aexit__(None, None, None)


async def length(server: RedisServer, name: str) -> int:
    """Turns of a trajectory that the server holds."""
    import redis.asyncio

    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(server.url)
    try:
        return int(await client.llen(f"agent_r3:{{{RUN}}}:turns:{name}"))
    finally:
        await client.aclose()


async def finish(store: TrajectoryWriter, name: str, turns: list[Turn]) -> None:
    for turn in turns:  # those that are there are recognised
        await store.append_turn(name, turn)
    await store.finish_trajectory(name, 1.0, Ending.FINISH, COUNTERS)

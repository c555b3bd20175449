"""A run in a real store in the middle of its work, as the roles would have left it."""

import json
from collections.abc import Mapping
from typing import cast

import numpy as np
import redis

from agent_r3.store import GroupReader, TrajectoryWriter
from agent_r3.store.scripts import Keys
from agent_r3.types import Ending, TrajectoryGroup
from tests.support.store import make_turns

COUNTERS: Mapping[str, int] = {"prompt_tokens": 90, "cached_tokens": 60, "reprefilled_tokens": 0}
GROUP_TOKENS = 2 * (2 + 1 + 3 + 2 + 4 + 3)  # two trajectories of three turns of make_turns


def beat(
    store: str,
    run: str,
    role: str,
    counters: Mapping[str, object] | None = None,
    /,
    *,
    age_s: float = 0.0,
    up_s: float = 60.0,
    **payload: object,
) -> None:
    """The last heartbeat of a role, `age_s` ago; it had been up for `up_s` then."""
    with redis.Redis.from_url(store) as client:
        seconds, micros = cast(tuple[int, int], client.time())
        now = seconds + micros / 1e6 - age_s
        told = {"started": now - up_s, "host": "box", "pid": 7, **(counters or {}), **payload}
        client.hset(Keys(run).roles, role, json.dumps({"time": now, "payload": told}))


async def publish(store: TrajectoryWriter, worker: str, version: int = 0, rewards: tuple[float, ...] = (0, 1)) -> int:
    """Claim a group, fill it with an episode a reward and publish it. Gives its index."""
    index = await store.claim_group(worker)
    assert index is not None
    names = tuple(f"g{index}-{i}" for i in range(len(rewards)))
    for name, reward in zip(names, rewards, strict=True):
        await store.open_trajectory(name, index, f"g{index}", "task")
        for turn in make_turns(np.random.default_rng(index), 3):
            await store.append_turn(name, turn)
        await store.finish_trajectory(name, reward, Ending.FINISH, COUNTERS)
    await store.publish_group(
        worker, TrajectoryGroup(f"g{index}", index, "task", version, names, rewards), {"generate": 1.5}
    )
    return index


async def make_live_run(url: str, run: str = "demo") -> None:
    """Policy 3; of 8 groups asked for three are published, the first is with the trainer; two are claimed, one is open.

    Roles: the trainer, an engine, and two workers of which the second has been silent for a minute.
    """
    with GroupReader.connect(url, run) as reader:
        reader.reset_position(0)
        reader.set_policy(2, "weights/2")
        reader.set_demand(8)
        async with TrajectoryWriter.connect(url, run) as store, TrajectoryWriter.connect(url, run) as other:
            await publish(store, "a", version=2)
            assert len(reader.read(count=1, block_s=10)) == 1
            reader.set_policy(3, "weights/3")
            await publish(store, "a", version=2, rewards=(1, 1))
            await publish(other, "b", version=3, rewards=(0, 0))
            for worker, claimer in (("a", store), ("b", other)):
                index = await claimer.claim_group(worker)
                assert index is not None
                await claimer.open_trajectory(f"g{index}-0", index, f"g{index}", "task")
            await store.append_turn("g3-0", make_turns(np.random.default_rng(0), 1)[0])
    beat(url, run, "trainer", state="training", step=3, policy_version=3)
    beat(url, run, "engine/0", state="serving", policy_version=3, url="http://engine:30000")
    failures = ({"sandbox": 2}, {"engine": 4, "sandbox": 1})
    for name, age_s, running, made, failed in (("a", 0, 5, 30, failures[0]), ("b", 60, 9, 10, failures[1])):
        counters = {"groups_running": 1, "episodes_running": running, "episodes": made, "failures": failed}
        beat(url, run, f"worker/{name}", counters, age_s=age_s, state="running", policy_version=3)

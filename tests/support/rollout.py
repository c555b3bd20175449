"""A rollout without engine and sandbox: claims groups in the real store and publishes scripted episodes for them."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from agent_r3.routing import rows_from
from agent_r3.store import TrajectoryWriter
from agent_r3.types import Ending, Int32Array, MoEShape, Routing, TrajectoryGroup, Turn
from tests.support.trajectories import random_rows

COUNTERS = {"prompt_tokens": 40, "cached_tokens": 16, "reprefilled_tokens": 0}
GOOD, BAD = 7, 9  # the token that a rewarded or an unrewarded episode repeats

Rewards = Callable[[int], list[float]]
"""Group index -> the rewards of its episodes."""


def alternating(samples: int) -> Rewards:
    """Every group is mixed: every second episode is rewarded."""
    return lambda index: [float(sample % 2) for sample in range(samples)]


def scripted_turns(index: int, sample: int, good: bool, version: int, shape: MoEShape) -> list[Turn]:
    """Two turns that depend on nothing but the arguments."""
    rng = np.random.default_rng([index, sample])
    start, turns = 0, []
    for number, prompt in enumerate((6 + sample, 3)):
        sampled = np.full(4 + sample % 3, GOOD if good else BAD, np.int32)
        stop = start + prompt + len(sampled) - 1
        turns.append(
            Turn(
                index=number,
                start=start,
                prompt_ids=_prompt(number, prompt),
                sampled_ids=sampled,
                logprobs=-6 - rng.random(len(sampled)).astype(np.float32),
                routing=Routing(rows_from(start), random_rows(rng, stop - rows_from(start), shape)),
                policy_version=version,
                cached_tokens=rows_from(start),
            )
        )
        start = stop + 1
    return turns


def _prompt(turn: int, length: int) -> Int32Array:
    return np.arange(20 + 50 * turn, 20 + 50 * turn + length, dtype=np.int32)


async def publish_group(
    store: TrajectoryWriter, worker: str, index: int, rewards: list[float], version: int, shape: MoEShape
) -> TrajectoryGroup:
    """Store the episodes of a claimed group and hand it to the trainer."""
    ids = [f"g{index}-{sample}" for sample in range(len(rewards))]
    for sample, (trajectory_id, reward) in enumerate(zip(ids, rewards, strict=True)):
        await store.open_trajectory(trajectory_id, f"g{index}", "task")
        for turn in scripted_turns(index, sample, reward > 0, version, shape):
            await store.append_turn(trajectory_id, turn)
        ending = Ending.MAX_TURNS if sample == 0 else Ending.FINISH
        await store.finish_trajectory(trajectory_id, reward, ending, COUNTERS)
    group = TrajectoryGroup(f"g{index}", index, "task", version, tuple(ids), tuple(rewards), {"engine": 1})
    await store.publish_group(worker, group, {"began": 100.0 + index, "ended": 103.0 + index, "generate": 2.0})
    return group


class ScriptedRollout:
    """`with ScriptedRollout(url, run, shape, rewards) as rollout:` a worker in a thread until the block ends."""

    def __init__(self, url: str, run: str, shape: MoEShape, rewards: Rewards, *, version: int | None = None) -> None:
        """`version` is what the groups claim to be sampled by; None takes the store's policy, as a worker does."""
        self.groups: list[TrajectoryGroup] = []  # published
        self._args = (url, run, shape, rewards, version)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "ScriptedRollout":
        self._done = self._pool.submit(lambda: asyncio.run(self._work(*self._args)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._done.result()  # raises what went wrong there

    async def _work(self, url: str, run: str, shape: MoEShape, rewards: Rewards, version: int | None) -> None:
        name = "worker-0"
        async with TrajectoryWriter.connect(url, run) as store:
            while not self._stop.is_set():
                index = await store.claim_group(name)
                if index is None:
                    await store.wait_for_work(timeout_s=0.2)
                    continue
                sampled_by = (await store.policy()).version if version is None else version
                self.groups.append(await publish_group(store, name, index, rewards(index), sampled_by, shape))

"""A rollout without engine and sandbox: claims groups in the real store and publishes scripted episodes for them."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from agent_r3.config import Config
from agent_r3.held_set import announcement, evaluation_config
from agent_r3.rollout.worker import task_at
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
    store: TrajectoryWriter,
    worker: str,
    index: int,
    rewards: list[float],
    version: int,
    shape: MoEShape,
    *,
    task: str = "task",
    failures: Mapping[str, int] | None = None,
) -> TrajectoryGroup:
    """Store the episodes of a claimed group and hand it to the trainer."""
    failures = {"engine": 1} if failures is None else failures
    ids = [f"g{index}-{sample}" for sample in range(len(rewards))]
    for sample, (trajectory_id, reward) in enumerate(zip(ids, rewards, strict=True)):
        await store.open_trajectory(trajectory_id, index, f"g{index}", task)
        for turn in scripted_turns(index, sample, reward > 0, version, shape):
            await store.append_turn(trajectory_id, turn)
        ending = Ending.MAX_TURNS if sample == 0 else Ending.FINISH
        await store.finish_trajectory(trajectory_id, reward, ending, COUNTERS)
    group = TrajectoryGroup(f"g{index}", index, task, version, tuple(ids), tuple(rewards), failures)
    seconds = {"began": 100.0 + index, "ended": 103.0 + index, "generate": 2.0, "turns": 2.0 * len(ids)}
    await store.publish_group(worker, group, seconds)
    return group


class ScriptedRollout:
    """`with ScriptedRollout(url, run, shape, rewards) as rollout:` a worker in a thread until the block ends."""

    def __init__(self, url: str, run: str, shape: MoEShape, rewards: Rewards, *, version: int | None = None) -> None:
        """`version` is what the groups claim to be sampled by; None takes the store's policy, as a worker does."""
        self.groups: list[TrajectoryGroup] = []  # published
        self._url, self._run, self._shape, self._version = url, run, shape, version
        self._rewards = rewards
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "ScriptedRollout":
        self._done = self._pool.submit(lambda: asyncio.run(self._work("worker-0")))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._done.result()  # raises what went wrong there

    async def _work(self, name: str) -> None:
        async with TrajectoryWriter.connect(self._url, self._run) as store:
            await self._begin(store, name)
            while not self._stop.is_set():
                index = await store.claim_group(name)
                if index is None:
                    await store.wait_for_work(timeout_s=0.2)
                    continue
                version = (await store.policy()).version if self._version is None else self._version
                await self._answer(store, name, index, version)

    async def _begin(self, store: TrajectoryWriter, name: str) -> None:
        """What comes before the first claim."""

    async def _answer(self, store: TrajectoryWriter, name: str, index: int, version: int) -> None:
        self.groups.append(await publish_group(store, name, index, self._rewards(index), version, self._shape))


class ScriptedHeldSet(ScriptedRollout):
    """A worker that answers for the held set of the training run `config`, whose tasks are these ids.

    A task of `rewards` gets its rewards; of those that are fewer than the episodes, the infrastructure failed the rest.
    A group whose index is in `held_back` is published once the test has taken it out of there, or the block ends.
    """

    def __init__(
        self,
        url: str,
        config: Config,
        shape: MoEShape,
        rewards: Mapping[str, list[float]],
        *,
        held_back: Sequence[int] = (),
        version: int | None = None,
    ) -> None:
        self.config = evaluation_config(config)
        super().__init__(url, self.config.run.name, shape, alternating(1), version=version)
        self._of_task = rewards
        self.held_back = set(held_back)

    def __enter__(self) -> "ScriptedHeldSet":
        super().__enter__()
        return self

    def task_of(self, index: int) -> str:
        """The task of a group, as a worker finds it."""
        return str(task_at(list(self._of_task), self.config.run.seed, index))  # type: ignore[arg-type]

    async def _begin(self, store: TrajectoryWriter, name: str) -> None:
        await store.heartbeat(name, announcement(self.config, len(self._of_task)))

    async def _answer(self, store: TrajectoryWriter, name: str, index: int, version: int) -> None:
        while index in self.held_back and not self._stop.is_set():
            await asyncio.sleep(0.02)
        task = self.task_of(index)
        rewards = self._of_task[task]
        failures = {"sandbox": self.config.rollout.samples_per_task - len(rewards)}
        failures = {kind: count for kind, count in failures.items() if count}
        self.groups.append(
            await publish_group(store, name, index, rewards, version, self._shape, task=task, failures=failures)
        )

"""A rollout worker: claims groups, runs their episodes, has them graded, publishes them. One asyncio loop.

Infrastructure failures end here: the episode is retried in a fresh container and, when that does not help, left out
of its group and counted by kind. They never become an observation or a reward.
"""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from structlog.contextvars import bind_contextvars

from agent_r3.archive import write_episode
from agent_r3.config import Config
from agent_r3.envs.sandbox import Grading, Sandbox, SandboxProvider
from agent_r3.errors import ClaimLostError, EngineError, InfraError, SandboxError, first_failure
from agent_r3.rollout.client import EngineFleet
from agent_r3.rollout.conversation import Agent
from agent_r3.rollout.episode import Episode, run_episode
from agent_r3.rollout.seeds import sampling_seed
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker_metrics import WorkerMetrics
from agent_r3.store import TrajectoryWriter
from agent_r3.telemetry import Telemetry
from agent_r3.tracing import annotate, span
from agent_r3.trajectory import engine_counters
from agent_r3.types import Grade, Task, TrajectoryGroup, Turn

log = structlog.get_logger(__name__)

T = TypeVar("T")


def task_at(tasks: Sequence[Task], seed: int, index: int) -> Task:
    """The task of group `index`: every epoch is its own shuffle of all tasks, the same for every worker."""
    epoch, place = divmod(index, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tasks[order[place]]


async def _all(works: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Their results, in order. The first failure cancels the others, waits for them, and is raised."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(work) for work in works]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class Group:
    """A claimed group while its episodes run."""

    index: int
    task: Task
    policy_version: int
    prompt_cached: asyncio.Event = field(default_factory=asyncio.Event)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # summed over the episodes

    @property
    def id(self) -> str:
        return f"g{self.index:06d}"

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the block's wall time to the group's seconds of `stage`."""
        began = time.monotonic()
        try:
            with span(stage):
                yield
        finally:
            self.seconds[stage] += time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Finished:
    """An episode that is through."""

    trajectory_id: str
    grade: Grade
    turns: int


class RolloutWorker:
    """Keeps up to `rollout.concurrency` episodes in flight while the store demands groups."""

    def __init__(
        self,
        name: str,
        config: Config,
        tasks: Sequence[Task],
        renderer: ChatRenderer,
        fleet: EngineFleet,
        provider: SandboxProvider,
        grader: Grading,
        store: TrajectoryWriter,
        *,
        metrics: WorkerMetrics | None = None,
        held_out: bool = False,
    ) -> None:
        """`held_out`: the tasks are a held set, asked for epoch by epoch, and sampling is seeded where it can be."""
        self._name = name
        self._config = config
        self._tasks = tasks
        self._renderer = renderer
        self._fleet = fleet
        self._provider = provider
        self._store = store
        self._grader = grader
        self._samples = config.rollout.samples_per_task
        self._held_out = held_out
        self._metrics = metrics or WorkerMetrics(Telemetry("rollout", config.run.name))
        self._draining = asyncio.Event()
        self._running: dict[int, asyncio.Task[None]] = {}  # by group index

    def drain(self) -> None:
        """Claim no more; `run` returns when the groups that are held are published."""
        self._draining.set()

    async def run(self) -> None:
        """Work until cancelled or drained. A bug or a broken contract ends it; an infrastructure failure does not."""
        places = asyncio.Semaphore(max(1, self._config.rollout.concurrency // self._samples))
        await self._announce(0)
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    await places.acquire()
                    index = await self._claim()
                    if index is None:
                        break
                    self._running[index] = groups.create_task(self._hold(index))
                    self._running[index].add_done_callback(lambda _: places.release())
        except BaseExceptionGroup as failed:
            raise first_failure(failed) from None

    async def _claim(self) -> int | None:
        """The next group's index; None once the worker is drained."""
        while not self._draining.is_set():
            if (index := await self._store.claim_group(self._name)) is not None:
                await self._end_former(index)
                await self._announce(index + 1)
                return index
            await self._unless_draining(self._store.wait_for_work(timeout_s=5.0))
        return None

    async def _unless_draining(self, work: Coroutine[object, object, object]) -> None:
        """Until `work` is through, whose errors are raised, or the worker is drained."""
        waits = [asyncio.create_task(work), asyncio.create_task(self._draining.wait())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for wait in done:
            wait.result()

    async def _end_former(self, index: int) -> None:
        """A claim that was lost can come back while the group still runs here, not knowing: it starts anew."""
        former = self._running.get(index)
        if former is not None:
            former.cancel()
            await asyncio.wait([former])

    async def _hold(self, index: int) -> None:
        """Run a claimed group; a lost claim ends it quietly, with its episodes and their sandboxes."""
        with self._metrics.group():
            try:
                await self._run_group(index)
            except ClaimLostError as exc:
                self._metrics.failed("claim_lost")
                log.warning("group given up", index=index, reason=str(exc))
        del self._running[index]

    async def _announce(self, index: int) -> None:
        """Say which sandboxes come next. It only saves time: where it fails, the episodes will hear of it."""
        try:
            await self._provider.prefetch(self._upcoming(index))
        except SandboxError as exc:
            log.warning("sandboxes are not started ahead of need", kind=exc.kind, error=str(exc))

    def _upcoming(self, index: int) -> list[Task]:
        """Whose containers come next, in order, one entry an episode, as far as they may be kept warm."""
        stop = index + self._config.sandbox.warm // self._samples + 1
        if self._held_out:  # the next epoch is some training steps away
            stop = min(stop, index + -index % len(self._tasks))
        groups = range(index, stop)
        return [task for i in groups for task in [task_at(self._tasks, self._config.run.seed, i)] * self._samples]

    async def _run_group(self, index: int) -> None:
        policy = await self._store.policy()
        group = Group(index, task_at(self._tasks, self._config.run.seed, index), policy.version)
        bind_contextvars(group=group.id, task=group.task.id, policy_version=policy.version)
        began = time.time()
        episodes = await _all(self._retry(group, sample) for sample in range(self._samples))
        graded = [episode for episode in episodes if episode is not None]
        await self._store.publish_group(
            self._name,
            TrajectoryGroup(
                id=group.id,
                index=index,
                task_id=group.task.id,
                policy_version=policy.version,
                trajectory_ids=tuple(episode.trajectory_id for episode in graded),
                rewards=tuple(episode.grade.reward for episode in graded),
                infra_failures=dict(group.failures),
            ),
            {
                "began": began,
                "ended": time.time(),
                "turns": float(sum(episode.turns for episode in graded)),
                "grades_run": float(sum(not episode.grade.cached for episode in graded)),
                **{f"grade/{kind}": float(n) for kind, n in Counter(e.grade.outcome for e in graded).items()},
                **group.seconds,
            },
        )
        self._metrics.published()

    async def _retry(self, group: Group, sample: int) -> Finished | None:
        """One episode, tried again after infrastructure failures; None when it is left out of the group."""
        try:
            for attempt in range(self._config.rollout.retries + 1):
                trajectory_id = f"{group.id}-{sample:02d}" + (f"-retry{attempt}" if attempt else "")
                bind_contextvars(episode=trajectory_id)
                version, held = group.policy_version, self._held_out
                named = {"episode": trajectory_id, "group": group.id, "task": group.task.id}
                try:
                    with (
                        self._metrics.episode(version),
                        span("episode", policy_version=version, held_out=held, **named),
                    ):
                        return await self._run_one(group, sample, trajectory_id)
                except InfraError as exc:
                    group.failures[exc.kind] += 1
                    self._metrics.failed(exc.kind)
                    log.warning("episode failed", trajectory=trajectory_id, kind=exc.kind, error=str(exc))
                    await self._store.drop_trajectory(trajectory_id)
                    if isinstance(exc, EngineError):
                        await self._wait_for_engine(group)
            log.error("episode left out", group=group.id, sample=sample, attempts=attempt + 1)
            return None
        finally:
            if sample == 0:
                group.prompt_cached.set()

    async def _wait_for_engine(self, group: Group) -> None:
        """Until the group's server answers again, at most `engine.start_timeout_s`: a killed one is started again."""
        try:
            async with asyncio.timeout(self._config.engine.start_timeout_s):
                while True:
                    try:
                        return await self._fleet.at(group.id).health()
                    except EngineError:
                        await asyncio.sleep(1.0)
        except TimeoutError:
            log.error("the engine did not come back", group=group.id, waited_s=self._config.engine.start_timeout_s)

    async def _run_one(self, group: Group, sample: int, trajectory_id: str) -> Finished:
        with group.timed("sandbox_wait"):
            sandbox = await self._provider.acquire(group.task)
        try:
            if sample > 0:  # the first one brings the prompt into the prefix cache
                with group.timed("prefix_wait"):
                    await group.prompt_cached.wait()
            episode = await self._converse(group, sample, trajectory_id, sandbox)
        finally:
            await sandbox.close()
        with group.timed("grade"):
            grade = await self._grader.grade(group.task, episode.patch)
            annotate(outcome=grade.outcome, reward=grade.reward, shared=grade.cached)
        counters = engine_counters(episode.turns)
        annotate(ending=str(episode.ending), reward=grade.reward, turns=len(episode.turns), **counters)
        await self._store.finish_trajectory(trajectory_id, grade.reward, episode.ending, counters)
        self._metrics.finished(episode.ending, grade)
        log.info(
            "episode finished",
            reward=grade.reward,
            outcome=grade.outcome,
            ending=str(episode.ending),
            turns=len(episode.turns),
        )
        if self._config.run.archive_trajectories:
            await asyncio.to_thread(
                write_episode,
                self._config.run.folder,
                group.policy_version,
                trajectory_id=trajectory_id,
                group_id=group.id,
                task_id=group.task.id,
                turns=episode.turns,
                ending=episode.ending,
                grade=grade,
                patch=episode.patch,
            )
        return Finished(trajectory_id, grade, len(episode.turns))

    async def _converse(self, group: Group, sample: int, trajectory_id: str, sandbox: Sandbox) -> Episode[Turn]:
        """The episode's turns, each appended to the store under the one policy version the group was claimed for."""

        async def append(turn: Turn) -> None:
            if turn.policy_version != group.policy_version:
                raise EngineError(
                    f"{trajectory_id} turn {turn.index} was sampled by policy {turn.policy_version}, "
                    f"the group is of policy {group.policy_version}"
                )
            await self._store.append_turn(trajectory_id, turn)
            self._metrics.turn(turn)

        await self._store.open_trajectory(trajectory_id, group.index, group.id, group.task.id)
        seed = sampling_seed(self._config.run.seed, group.task.id, sample) if self._held_out else None
        agent = Agent(self._fleet.at(group.id), self._renderer, self._config.agent, seed)
        return await run_episode(agent, group.task, sandbox, append, after_first=group.prompt_cached.set)

"""The rollout worker with real containers, grading and store; only the model is scripted."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agent_r3.archive import check_trajectory, list_episodes, read_episode
from agent_r3.config import Config, SandboxConfig
from agent_r3.envs.backend import Backend, open_backend
from agent_r3.envs.grading import Grader
from agent_r3.envs.local import open_pool
from agent_r3.errors import DaemonError, DataError, EngineError
from agent_r3.hfconfig import read_model
from agent_r3.rollout.engine import Generation
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker import RolloutWorker, task_at
from agent_r3.store import Delivery, EmbeddedServer, GroupReader, TrajectoryWriter
from agent_r3.tools.parsers import render
from agent_r3.types import Int32Array, MoEShape, Task, ToolCall
from tests.support.broker import MemoryGrader, MemoryProvider, broker_process
from tests.support.engine import save_tiny_moe
from tests.support.scripted import ScriptedEngine

pytestmark = pytest.mark.docker

SHAPE = MoEShape(num_layers=4, num_experts=16, top_k=4)
RUN = "worker-test"


def call(name: str, **arguments: object) -> str:
    return render(ToolCall(name, arguments), "r2e_xml")


FIX = call(
    "file_editor",
    command="str_replace",
    path="/testbed/pathspec/pathspec.py",
    old_str="return include\n",
    new_str="return bool(include)\n",
)
SUBMIT = call("finish", command="submit", result="")


class FleetEngine:
    """Takes the fleet's next script at its first request; None in it is a server that is gone for one request."""

    def __init__(self, fleet: "ScriptedFleet") -> None:
        self._fleet = fleet
        self._scripted: ScriptedEngine | None = None

    async def generate(self, input_ids: Int32Array, **kwargs: Any) -> Generation:
        if self._scripted is None:
            self._scripted = ScriptedEngine(
                self._fleet.renderer, self._fleet.scripts.pop(0), shape=SHAPE, version=self._fleet.version
            )
        try:
            return await self._scripted.generate(input_ids, **kwargs)
        except EngineError:
            if self._scripted.rest:
                self._fleet.scripts.insert(0, self._scripted.rest)  # for the episode's next attempt
            raise

    async def health(self) -> None:
        """The server is back at once."""


@dataclass
class ScriptedFleet:
    """One script an episode."""

    renderer: ChatRenderer
    scripts: list[list[str | None]]
    version: int = 0

    def at(self, key: str) -> FleetEngine:
        return FleetEngine(self)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.from_folder(read_model(save_tiny_moe(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with EmbeddedServer(tmp_path / "store") as server:
        yield server.url


def config_of(folder: Path, **rollout: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": RUN, "dir": str(folder)},
            "model": {"path": "scripted"},
            "tasks": {"dataset": "offline"},
            "agent": {"system_prompt": "s", "max_tokens": 4096, "max_turn_tokens": 512},
            "rollout": {"samples_per_task": 2, "concurrency": 4, **rollout},
            "sandbox": {"warm": 2},
        }
    )


def publish(
    store: str, config: Config, renderer: ChatRenderer, task: Task, fleet: ScriptedFleet, backend: Backend | None = None
) -> list[Delivery]:
    """Run a worker, over the config's backend or another one, until it has published a group."""
    configured = open_backend(config.sandbox, config.grading, run=RUN, owner="w")

    async def work() -> list[Delivery]:
        async with (
            nullcontext(backend) if backend else configured as (pool, grader),
            TrajectoryWriter.connect(store, RUN) as writer,
        ):
            worker = RolloutWorker("w", config, [task], renderer, fleet, pool, grader, writer)  # type: ignore[arg-type]
            running = asyncio.create_task(worker.run())
            try:
                with GroupReader.connect(store, RUN) as reader:
                    reader.reset_position(0)
                    reader.set_policy(0, "weights")
                    reader.set_demand(1)
                    found: list[Delivery] = []
                    while not found:
                        assert not running.done(), running
                        found += await asyncio.to_thread(reader.read, 1, 1.0)
                    return found
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

    return asyncio.run(asyncio.wait_for(work(), 120))


def test_a_group_is_run_graded_by_hidden_tests_and_published(
    store: str, renderer: ChatRenderer, pathspec_task: Task, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    fleet = ScriptedFleet(renderer, [[FIX, SUBMIT], [SUBMIT]])
    (delivery,) = publish(store, config, renderer, pathspec_task, fleet)
    assert sorted(delivery.group.rewards) == [0.0, 1.0]
    assert delivery.group.infra_failures == {}
    assert delivery.seconds["grades_run"] == 2
    outcomes = {name: count for name, count in delivery.seconds.items() if name.startswith("grade/")}
    assert outcomes == {"grade/passed": 1, "grade/failed": 1}
    with GroupReader.connect(store, RUN) as reader:
        for trajectory_id in delivery.group.trajectory_ids:
            trajectory = reader.load(trajectory_id)
            assert len(trajectory.routing.experts) == len(trajectory.tokens) - 1


def test_a_worker_needs_nothing_but_a_broker_for_its_sandboxes_and_grades(
    store: str,
    renderer: ChatRenderer,
    pathspec_task: Task,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = {"dataset": "offline", "include": [pathspec_task.id]}
    with broker_process(tmp_path, {"run": {"name": run_name}, "tasks": tasks}) as broker:
        monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
        config = config_of(tmp_path)
        config = config.model_copy(update={"sandbox": SandboxConfig(broker=broker.address, warm=2)})
        (delivery,) = publish(
            store, config, renderer, pathspec_task, ScriptedFleet(renderer, [[FIX, SUBMIT], [SUBMIT]])
        )
        assert sorted(delivery.group.rewards) == [0.0, 1.0] and delivery.group.infra_failures == {}
    operations = [line["event"] for line in broker.audit()]
    assert operations.count("acquire") == operations.count("close") == operations.count("grade") == 2


def test_a_plan_that_cannot_be_announced_does_not_end_the_worker(
    store: str, renderer: ChatRenderer, pathspec_task: Task, tmp_path: Path
) -> None:
    class Planless(MemoryProvider):
        async def prefetch(self, tasks: list[Task]) -> None:
            raise DaemonError("the engine is being started again")

    fleet = ScriptedFleet(renderer, [[SUBMIT], [SUBMIT]])
    backend = Backend(Planless(), MemoryGrader())
    (delivery,) = publish(store, config_of(tmp_path), renderer, pathspec_task, fleet, backend)
    assert delivery.group.rewards == (0.5, 0.5)


def test_every_archived_episode_holds_exactly_what_the_engine_saw(
    store: str, renderer: ChatRenderer, pathspec_task: Task, tmp_path: Path
) -> None:
    publish(store, config_of(tmp_path), renderer, pathspec_task, ScriptedFleet(renderer, [[FIX, SUBMIT], [SUBMIT]]))
    episodes = [read_episode(path) for path in list_episodes(tmp_path / RUN)]
    assert len(episodes) == 2
    for episode in episodes:
        check_trajectory(episode)
        assert episode.info.patch.startswith("diff --git") == (episode.info.reward == 1.0)


def test_an_engine_failure_is_retried_and_counted_and_never_a_reward(
    store: str, renderer: ChatRenderer, pathspec_task: Task, tmp_path: Path
) -> None:
    fleet = ScriptedFleet(renderer, [[None, FIX, SUBMIT], [SUBMIT]])
    (delivery,) = publish(store, config_of(tmp_path), renderer, pathspec_task, fleet)
    assert sorted(delivery.group.rewards) == [0.0, 1.0]
    assert delivery.group.infra_failures == {"engine": 1}


def test_an_episode_that_keeps_failing_is_left_out_of_its_group(
    store: str, renderer: ChatRenderer, pathspec_task: Task, tmp_path: Path
) -> None:
    fleet = ScriptedFleet(renderer, [[None, None], [FIX, SUBMIT]])
    (delivery,) = publish(store, config_of(tmp_path, retries=1), renderer, pathspec_task, fleet)
    assert delivery.group.rewards == (1.0,)
    assert delivery.group.infra_failures == {"engine": 2}


def test_a_turn_of_another_policy_version_is_refused(
    store: str, renderer: ChatRenderer, pathspec_task: Task, tmp_path: Path
) -> None:
    fleet = ScriptedFleet(renderer, [[SUBMIT], [SUBMIT]], 3)
    (delivery,) = publish(store, config_of(tmp_path, retries=0), renderer, pathspec_task, fleet)
    assert delivery.group.trajectory_ids == ()
    assert delivery.group.infra_failures == {"engine": 2}


def test_a_missing_image_ends_the_worker_with_one_line(
    store: str, renderer: ChatRenderer, pathspec_task: Task, tmp_path: Path
) -> None:
    missing = replace(pathspec_task, image="agent-r3/none:0")
    config = config_of(tmp_path)

    async def work() -> None:
        pool = open_pool(config.sandbox, run=RUN)
        async with TrajectoryWriter.connect(store, RUN) as writer:
            fleet = ScriptedFleet(renderer, [])
            grader = Grader(pool, config.grading)
            worker = RolloutWorker("w", config, [missing], renderer, fleet, pool, grader, writer)  # type: ignore[arg-type]
            await worker.run()

    with pytest.raises(DataError, match="agent-r3/none:0"):
        asyncio.run(work())


def test_data_order_is_a_shuffle_of_all_tasks_in_every_epoch(pathspec_task: Task) -> None:
    tasks = [replace(pathspec_task, id=str(i)) for i in range(7)]
    first, second = ([task_at(tasks, 5, i).id for i in range(epoch * 7, epoch * 7 + 7)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == [str(i) for i in range(7)]
    assert first != second
    assert [task_at(tasks, 5, i).id for i in range(7)] == first

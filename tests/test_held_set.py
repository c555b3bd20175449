"""The held set on the worker's side, what of the config an evaluation in training takes, and how it is shown."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agent_r3.config import Config, SamplingConfig, TasksConfig
from agent_r3.envs.datasets import join_tasks
from agent_r3.errors import ConfigError, DataError
from agent_r3.held_set import announced_tasks, announcement, evaluation_config, is_due
from agent_r3.hfconfig import read_model
from agent_r3.metrics import MetricsWriter
from agent_r3.progress import StepProgress, step_line
from agent_r3.report import print_table, summarize
from agent_r3.rollout.plans import SharedProvider
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker import RolloutWorker, task_at
from agent_r3.store import Delivery, EmbeddedServer, GroupReader, RoleState, TrajectoryWriter
from agent_r3.tools.parsers import render
from agent_r3.types import MoEShape, Task, ToolCall
from tests.support.broker import MemoryGrader, MemoryProvider
from tests.support.docker import make_task
from tests.support.scripted import ScriptedEngine

SHAPE = MoEShape(num_layers=4, num_experts=16, top_k=4)
SUBMIT = render(ToolCall("finish", {"command": "submit", "result": ""}), "r2e_xml")


def config_of(folder: Path = Path("runs"), **held: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "demo", "dir": folder, "seed": 5},
            "model": {"path": "tiny"},
            "tasks": {"dataset": "offline", "include": ["trained"]},
            "rollout": {"samples_per_task": 2, "groups_per_step": 3, "concurrency": 4},
            "sandbox": {"warm": 4},
            "agent": {"system_prompt": "s", "max_tokens": 4096, "max_turn_tokens": 512},
            "train": {"steps": 7},
            "eval": {"every": 3, "samples": 1, **held},
        }
    )


def test_an_evaluation_is_a_run_below_the_training_with_its_own_tasks_sampling_and_seed() -> None:
    own = evaluation_config(
        config_of(tasks={"dataset": "held.jsonl"}, sampling={"temperature": 0.0}, samples=1, seed=9, concurrency=3)
    )
    assert (own.run.name, own.run.folder, own.run.seed) == ("demo/eval", Path("runs/demo/eval"), 9)
    assert (own.tasks, own.sampling) == (TasksConfig(dataset="held.jsonl"), SamplingConfig(temperature=0.0))
    assert (own.rollout.samples_per_task, own.rollout.concurrency) == (1, 3)
    bare, config = evaluation_config(config_of()), config_of()
    assert (bare.tasks, bare.sampling, bare.agent) == (config.tasks, config.sampling, config.agent)


def test_the_policy_is_evaluated_before_the_first_step_every_so_often_and_after_the_last() -> None:
    assert [step for step in range(8) if is_due(config_of(), step)] == [0, 3, 6, 7]
    assert not any(is_due(config_of(every=0), step) for step in range(8))


def test_a_training_that_would_evaluate_another_model_is_refused_by_every_role(tmp_path: Path) -> None:
    from agent_r3.rollout.service import run_worker
    from agent_r3.supervise import preflight
    from agent_r3.trainer.loop import main

    config = config_of(tmp_path, endpoint="http://127.0.0.1:1/v1")
    urls = {"store": {"url": "redis://127.0.0.1:1"}, "engine": {"urls": ["http://127.0.0.1:1"]}}
    role = Config.model_validate({**config.model_dump(), **urls})
    with pytest.raises(ConfigError, match=r"eval\.every=3 .* leave eval\.endpoint out"):
        preflight(config)
    with pytest.raises(ConfigError, match=r"eval\.every=3"):
        main(role, "redis://127.0.0.1:1", role.engine.urls)
    with pytest.raises(ConfigError, match=r"eval\.every=3"):
        asyncio.run(run_worker(role, "worker-0"))


def test_the_trainer_believes_only_workers_with_the_same_evaluation_and_the_latest_of_them() -> None:
    own, other = (evaluation_config(config_of(samples=samples)) for samples in (1, 2))
    roles = {
        "trainer": RoleState(0.0, {"evaluating": "x", "tasks": 1, "step": 0}),
        "worker-0": RoleState(5.0, announcement(own, 7)),
        "worker-1": RoleState(50.0, announcement(own, 9)),
        "worker-2": RoleState(1.0, announcement(other, 8)),
    }
    assert announced_tasks(roles, own) == 7
    assert announced_tasks({"trainer": roles["trainer"], "worker-2": roles["worker-2"]}, own) is None


def test_tasks_are_joined_by_id_and_an_id_of_two_tasks_is_refused() -> None:
    a, b = make_task("image", "a"), make_task("image", "b")
    assert join_tasks([a], [replace(a, dataset="held.jsonl"), b]) == [a, b]
    with pytest.raises(DataError, match=r"task id a stands for one task in offline .* another in held\.jsonl"):
        join_tasks([a], [replace(a, dataset="held.jsonl", image="other")])


class Fleet:
    """An engine for each episode; it remembers under which seeds it was asked."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.seeds: list[int | None] = []

    def at(self, key: str) -> ScriptedEngine:
        fleet = self

        class Engine(ScriptedEngine):
            async def generate(self, input_ids, *, max_new_tokens, rows_from, seed=None):  # type: ignore[no-untyped-def]
                fleet.seeds.append(seed)
                return await super().generate(input_ids, max_new_tokens=max_new_tokens, rows_from=rows_from, seed=seed)

        return Engine(self._renderer, [SUBMIT], shape=SHAPE)


async def rollouts(
    url: str, configs: list[Config], tasks: list[list[Task]], fleets: list[Fleet], provider: MemoryProvider
) -> list[list[Delivery]]:
    """Workers of one process, the second one with a held set; each is asked for every task once, one after another."""
    shared, found = SharedProvider.of(provider), []
    async with asyncio.TaskGroup() as running:
        works = []
        for place, (config, of_run, fleet) in enumerate(zip(configs, tasks, fleets, strict=True)):
            writer = TrajectoryWriter.connect(url, config.run.name)
            works.append(running.create_task(work(writer, config, of_run, fleet, shared, held_out=place > 0)))
            shared = shared.share()
        for config, of_run in zip(configs, tasks, strict=True):
            with GroupReader.connect(url, config.run.name) as store:
                store.set_policy(0, "weights")
                store.set_demand(len(of_run))
                groups: list[Delivery] = []
                while len(groups) < len(of_run):
                    groups += await asyncio.to_thread(store.read, len(of_run), 1.0)
                found.append(groups)
        for worker in works:
            worker.cancel()
    return found


async def work(writer, config, tasks, fleet, provider, *, held_out):  # type: ignore[no-untyped-def]
    async with writer as store:
        worker = RolloutWorker(
            "w", config, tasks, fleet._renderer, fleet, provider, MemoryGrader(), store, held_out=held_out
        )
        with suppress(asyncio.CancelledError):
            await worker.run()


def test_a_process_answers_for_both_sets_and_each_has_its_own_order_seeds_and_archive(
    tiny_moe: Path, tmp_path: Path
) -> None:
    renderer = ChatRenderer.from_folder(read_model(tiny_moe))
    training = config_of(tmp_path)
    held = evaluation_config(training)
    sets = [[make_task("image", f"{kind}-{number}") for number in range(4)] for kind in ("trained", "held")]
    fleets, provider = [Fleet(renderer), Fleet(renderer)], MemoryProvider()
    with EmbeddedServer(tmp_path / "store") as server:
        found = asyncio.run(rollouts(server.url, [training, held], sets, fleets, provider))
    for config, tasks, groups in zip((training, held), sets, found, strict=True):
        order = [task_at(tasks, config.run.seed, index).id for index in range(4)]
        assert [g.group.task_id for g in sorted(groups, key=lambda d: d.group.index)] == order
        assert all(len(g.group.rewards) == config.rollout.samples_per_task == g.seconds["turns"] for g in groups)
        assert len(list(config.run.folder.glob("trajectories/step_0/*.safetensors"))) == 4 * int(
            groups[0].seconds["turns"]
        )
    assert fleets[0].seeds == [None] * 8
    assert len(set(fleets[1].seeds)) == 4 and None not in fleets[1].seeds
    of_held = [[task for task in plan if task.startswith("held")] for plan in provider.plans]
    of_training = [[task for task in plan if task.startswith("trained")] for plan in provider.plans]
    held_order = [task_at(sets[1], held.run.seed, index).id for index in range(4)]
    assert of_held[-4:] == [held_order[place:] for place in (1, 2, 3, 4)], "to the end of the held set, not beyond"
    assert all(plan == [] for plan in of_held[:-4]) and all(plan == of_training[-4] != [] for plan in of_training[-4:])


EVALUATION = {
    "eval/pass@1": 0.25,
    "eval/pass@1_low": 0.1,
    "eval/pass@1_high": 0.5,
    "eval/tasks": 8,
    "eval/episodes": 16,
}


def test_the_figures_after_the_last_step_are_no_step_of_their_own() -> None:
    lines = [{"step": 0, "train/reward_mean": 0.5, **EVALUATION}, {"step": 1, "train/reward_mean": 0.5}]
    after = {"step": 2, **EVALUATION, "eval/pass@1": 0.75}
    summary = summarize([*lines, after], seed=0)
    assert summary["steps"] == 2
    assert [(found["step"], found["pass@1"], found["episodes"]) for found in summary["evaluations"]] == [
        (0, 0.25, 16),
        (2, 0.75, 16),
    ]
    assert [step_line(line, 2) for line in (*lines, after)] == [
        "step 1/2 | pass@1 before 0.250 | reward 0.500",
        "step 2/2 | reward 0.500",
        "after step 2/2 | pass@1 0.750",
    ]


def test_the_table_has_the_first_and_the_last_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"step": step, **EVALUATION, "eval/pass@1": step / 10} for step in (0, 3, 6)]
    print_table(summarize(lines, seed=0))
    out = capsys.readouterr().out
    assert "pass@1 on the held set after 0 steps" in out and "after 6 steps" in out and "after 3 steps" not in out
    assert "0.1 to 0.5" in out


async def test_progress_says_each_line_once_though_a_resumed_trainer_writes_the_file_anew(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, first_step=0) as metrics:
        metrics.write(0, {"train/loss": 1.0})
    with (tmp_path / "out").open("w") as out:
        async with StepProgress(tmp_path / "metrics.jsonl", 4, Console(file=out, width=200)) as progress:
            with MetricsWriter(tmp_path, first_step=1) as metrics:
                metrics.write(1, {"train/loss": 1.0})
                metrics.write(2, {"train/loss": 1.0, **EVALUATION})
            progress._read_new()
            with MetricsWriter(tmp_path, first_step=2) as metrics:
                progress._read_new()
                metrics.write(2, {"train/loss": 1.0})
                metrics.write(3, {"train/loss": 1.0})
    said = [line.split("] ")[1] for line in (tmp_path / "out").read_text().splitlines()]
    assert said == ["step 2/4", "step 3/4 | pass@1 before 0.250", "step 3/4", "step 4/4"]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [0, 1, 2, 3]

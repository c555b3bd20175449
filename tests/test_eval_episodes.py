"""What an evaluation does next, when it may go on, and what infrastructure failures come to; the model is scripted."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rich.console import Console

from agent_r3.archive import TurnText, read_info, transcript_path
from agent_r3.config import AgentConfig, Config
from agent_r3.errors import ConfigError, DaemonError, DataError, EngineError, GradingError, UserError
from agent_r3.eval import resume
from agent_r3.eval.episodes import EpisodeRunner
from agent_r3.eval.folder import EvaluationFolder, digest, episode_id
from agent_r3.eval.model import policy_name
from agent_r3.eval.plan import Work, plan
from agent_r3.eval.progress import EvaluationProgress, pass_at_1, verdict_line
from agent_r3.eval.records import EpisodeFacts, Failure, Graded, Prediction
from agent_r3.eval.resume import measured, require_agreement, settle_config
from agent_r3.eval.run import missing, preflight
from agent_r3.eval.verdicts import Verdicts, mend_last
from agent_r3.rollout.conversation import Reply
from agent_r3.rollout.seeds import sampling_seed
from agent_r3.tools.toolbox import Toolbox
from agent_r3.types import Ending, Grade, Observation, Task, ToolCall
from tests.support.docker import make_task
from tests.support.r2e_rows import r2e_row
from tests.support.scripted import DictSandbox

TASKS = [make_task("image", f"task-{number}") for number in range(12)]


def config_of(**sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "scripted"},
        "tasks": {"dataset": "offline"},
        "engine": {"start_timeout_s": 0.05},
        "rollout": {"retries": 2},
    }
    for name, section in sections.items():
        tree.setdefault(name, {}).update(section)
    return Config.model_validate(tree)


def test_sample_0_of_every_task_comes_before_sample_1_of_any() -> None:
    work = plan(TASKS, 3, 5, ())
    assert [item.sample for item in work] == [0] * 12 + [1] * 12 + [2] * 12
    first = [item.task.id for item in work[:12]]
    assert sorted(first) == sorted(task.id for task in TASKS)
    assert [item.task.id for item in work[12:24]] == first


def test_the_order_of_tasks_is_the_seeds_and_not_the_datasets() -> None:
    assert plan(TASKS, 1, 5, ()) == plan(TASKS, 1, 5, ())
    orders = {tuple(item.task.id for item in plan(TASKS, 1, seed, ())) for seed in range(4)}
    assert len(orders) == 4 and tuple(task.id for task in TASKS) not in orders


def test_what_is_done_is_left_out_and_the_rest_keeps_its_place() -> None:
    every = plan(TASKS, 2, 5, ())
    done = {item.key for item in every[::3]}
    assert plan(TASKS, 2, 5, done) == [item for item in every if item.key not in done]


def test_every_episode_has_a_seed_of_its_own_that_leaves_room_for_its_turns() -> None:
    keys = [(task.id, sample) for task in TASKS for sample in range(50)]
    seeds = [sampling_seed(1_000, *key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [sampling_seed(1_000, *key) for key in keys]
    assert not set(seeds) & {sampling_seed(1_001, *key) for key in keys}
    assert all(0 <= seed < 2**31 - 10_000 for seed in seeds)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model.path", {"model": {"path": "another"}}),
        ("tasks.dataset", {"tasks": {"dataset": "r2e.parquet"}}),
        ("tasks.dataset", {"eval": {"tasks": {"dataset": "r2e.parquet"}}}),
        ("agent.max_turns", {"agent": {"max_turns": 3}}),
        ("sampling.temperature", {"eval": {"sampling": {"temperature": 0}}}),
        ("sandbox.memory", {"sandbox": {"memory": "4g"}}),
        ("grading.timeout_s", {"grading": {"timeout_s": 3}}),
        ("engine.dtype", {"engine": {"dtype": "float16"}}),
        ("eval.seed", {"eval": {"seed": 3}}),
        ("eval.endpoint", {"eval": {"endpoint": "http://localhost:1/v1"}}),
    ],
)
def test_a_folder_is_not_gone_on_with_when_what_is_measured_changes(key: str, change: dict[str, Any]) -> None:
    old, new = config_of(), config_of(**change)
    with pytest.raises(ConfigError, match=rf"here was evaluated with {key}=.*, now it is .*; choose another --out$"):
        require_agreement(old, new, "here")
    assert measured(old)[key] != measured(new)[key]


def test_more_samples_other_places_and_the_same_values_under_other_keys_are_no_change() -> None:
    same = {"dataset": "offline", "include": ["a"]}
    changes = {
        "run": {"name": "other"},
        "sandbox": {"warm": 7},
        "tasks": {"dataset": "x.parquet"},
        "engine": {"urls": ["http://there:1"], "max_running_requests": 3},
        "grading": {"concurrency": 1},
        "eval": {"samples": 4, "concurrency": 3, "tasks": same, "sampling": {}},
    }
    require_agreement(config_of(tasks=same), config_of(**changes), "here")
    with pytest.raises(ConfigError, match=r"has eval\.samples=4, now it is 1: it can only grow"):
        require_agreement(config_of(eval={"samples": 4}), config_of(), "here")


def test_every_key_that_may_change_is_one_of_the_config() -> None:
    def has(model: type[BaseModel], key: str) -> bool:
        name, _, rest = key.partition(".")
        section = model.model_fields[name].annotation
        return not rest or (isinstance(section, type) and issubclass(section, BaseModel) and has(section, rest))

    assert all(has(Config, key) for key in resume._FREE)


def test_the_folders_config_is_the_last_one_and_predictions_without_one_are_refused(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    settle_config(folder, config_of())
    settle_config(folder, config_of(eval={"samples": 3}))
    with pytest.raises(ConfigError, match="can only grow"):
        settle_config(folder, config_of())
    (tmp_path / "config.yaml").unlink()
    folder.add_prediction(Prediction("task-0", "m", ""))
    with pytest.raises(ConfigError, match=r"has predictions but no config\.yaml"):
        settle_config(folder, config_of())


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/models/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("runs/demo/weights/v000026", "demo/v000026"),
        ("tiny", "tiny"),
        ("/weights/tiny", "tiny"),
    ],
)
def test_a_policy_is_named_by_its_folder_and_one_of_a_run_by_that_too(folder: str, name: str) -> None:
    assert policy_name(Path(folder)) == name


def test_pass_at_1_so_far_is_the_mean_over_instances() -> None:
    assert pass_at_1({}) == 0
    assert pass_at_1({("a", 0): True, ("a", 1): False, ("b", 0): True}) == 0.75


def test_a_verdict_is_one_line_with_how_its_episode_went() -> None:
    facts = EpisodeFacts(Ending.MAX_TURNS, 50, 9, 8, 7, {"total": 61.25})
    graded = Graded("a__b-1", 1, "", "failed", 0.0, "failed", "2 of 9 differ", 3.0)
    line = verdict_line(Prediction("a__b-1", "m", "x", 1, facts), graded, 3, 10, 1 / 3)
    assert line == "3/10 a__b-1 #1: failed | 50 turns | max_turns | 61.2 s | Pass@1 so far 0.333"


@dataclass
class Speaker:
    """Submits at once; raises what `failures` says first."""

    model: "ScriptedModel"
    task_id: str
    config: AgentConfig = field(default_factory=AgentConfig)
    index: int = 0

    def begin(self, task: Task, toolbox: Toolbox) -> "Speaker":
        return self

    async def reply(self) -> Reply | None:
        failures = self.model.failures.get(self.task_id, [])
        if failures and (failure := failures.pop(0)) is not None:
            raise failure
        return Reply("bye", True, [ToolCall("finish", {"command": "submit", "result": ""})])

    def turn(
        self, calls: Sequence[ToolCall], observations: tuple[Observation, ...], seconds: Mapping[str, float]
    ) -> TurnText:
        return TurnText(0, 0, 11, 5, 0, 3, "bye", tuple(calls), observations, seconds)

    def observe(self, observations: Sequence[Observation]) -> None:
        raise AssertionError("the episode is over")


@dataclass
class ScriptedModel:
    """Task id -> what its requests raise, one after the other. `away`: it does not come back."""

    failures: dict[str, list[Exception | None]] = field(default_factory=dict)
    away: bool = False
    name: str = "scripted"
    cache_known: bool = True
    seeds: list[int] = field(default_factory=list)

    def speaker(self, instance_id: str, seed: int) -> Speaker:
        self.seeds.append(seed)
        return Speaker(self, instance_id)

    async def require_answer(self, instance_id: str) -> None:
        if self.away:
            raise EngineError("gone")


@dataclass
class Backend:
    """Sandboxes of a dictionary, grades that resolve; either may fail first."""

    failures: list[Exception] = field(default_factory=list)
    grading: list[Exception] = field(default_factory=list)
    sandboxes: list[DictSandbox] = field(default_factory=list)
    planned: list[list[str]] = field(default_factory=list)

    async def prefetch(self, tasks: list[Task]) -> None:
        self.planned.append([task.id for task in tasks])

    async def acquire(self, task: Task) -> DictSandbox:
        if self.failures:
            raise self.failures.pop(0)
        self.sandboxes.append(DictSandbox())
        return self.sandboxes[-1]

    async def grade(self, task: Task, patch: bytes) -> Grade:
        if self.grading:
            raise self.grading.pop(0)
        return Grade(1.0, {}, "all 0 as expected", 0.1, outcome="passed")


def run(
    folder: EvaluationFolder, model: ScriptedModel, backend: Backend, work: Sequence[Work], **sections: dict[str, Any]
) -> str:
    """Episodes and gradings until the end; what the progress said."""
    console = Console(file=io.StringIO(), width=200)

    async def everything() -> None:
        with EvaluationProgress(folder, len(work), console) as progress:
            async with asyncio.TaskGroup() as gradings:
                verdicts = Verdicts(folder, backend, progress, gradings)
                runner = EpisodeRunner(config_of(**sections), folder, model, backend, progress, verdicts.begin)  # type: ignore[arg-type]
                await runner.run(work)

    asyncio.run(everything())
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_prediction_and_a_transcript_say_how_the_episode_went(tmp_path: Path) -> None:
    folder, model = EvaluationFolder(tmp_path), ScriptedModel()
    said = run(folder, model, Backend(), [Work(TASKS[0], 2)])
    again = EvaluationFolder(tmp_path)
    prediction = again.predictions["task-0", 2]
    assert (prediction.model_name_or_path, prediction.model_patch) == ("scripted", "a change")
    facts = prediction.episode
    assert facts is not None
    assert (facts.ending, facts.turns, facts.attempts) == (Ending.FINISH, 1, 1)
    assert (facts.prompt_tokens, facts.cached_tokens, facts.sampled_tokens) == (11, 3, 5)
    assert facts.seconds.keys() == {"generate", "tools", "sandbox", "total"}
    assert model.seeds == [sampling_seed(1_000, "task-0", 2)]
    info = read_info(transcript_path(tmp_path, episode_id(("task-0", 2))))
    assert (info.task_id, info.reward, info.reason, info.outcome) == ("task-0", 1.0, "all 0 as expected", "passed")
    assert [turn.text for turn in info.turns] == ["bye"]
    assert "1/1 task-0 #2: resolved | 1 turn | finish |" in said


def test_without_transcripts_there_are_verdicts_all_the_same(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    run(folder, ScriptedModel(), Backend(), [Work(TASKS[0], 0)], run={"archive_trajectories": False})
    assert not (tmp_path / "trajectories").exists()
    assert folder.grades["task-0", 0].verdict == "resolved"


def test_an_infrastructure_failure_is_tried_again_in_a_fresh_sandbox_and_counted(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    model = ScriptedModel({"task-0": [EngineError("reset"), None]})
    backend = Backend([DaemonError("no")])
    run(folder, model, backend, [Work(TASKS[0], 0)])
    facts = folder.predictions["task-0", 0].episode
    assert facts is not None and facts.attempts == 3
    assert folder.failures == [] and len(backend.sandboxes) == 2
    assert all(sandbox.closed for sandbox in backend.sandboxes)


def test_an_episode_that_keeps_failing_is_left_out_and_the_next_run_tries_it_again(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    work = [Work(task, 0) for task in TASKS[:2]]
    said = run(folder, ScriptedModel({"task-0": [EngineError("reset")] * 3}), Backend(), work)
    assert "task-0 #0: left out, its episode failed (engine, 3 times): reset" in said
    assert set(folder.predictions) == {("task-1", 0)}
    assert missing(folder, [item.key for item in work]) == Counter(engine=1)
    again = EvaluationFolder(tmp_path)
    run(again, ScriptedModel(), Backend(), plan(TASKS[:2], 1, 0, again.predictions))
    facts = again.predictions["task-0", 0].episode
    assert facts is not None and facts.attempts == 1, "the failures have lines of their own"
    assert missing(again, [item.key for item in work]) == Counter()


def test_a_model_that_does_not_come_back_ends_the_run_and_what_was_not_begun_is_not_called_failed(
    tmp_path: Path,
) -> None:
    folder = EvaluationFolder(tmp_path)
    model = ScriptedModel({"task-1": [EngineError("reset")]}, away=True)
    work = [Work(task, 0) for task in TASKS[:4]]
    said = run(folder, model, Backend(), work, eval={"concurrency": 1})
    assert said.count("the model did not answer for 0.05 s; no further episode is begun") == 1
    assert [failure.instance_id for failure in folder.failures] == ["task-1"]
    assert missing(folder, [item.key for item in work]) == {"engine": 1, "not begun": 2}


def test_a_task_that_nobody_can_run_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    backend = Backend([DataError("image x is not there")])
    said = run(folder, ScriptedModel(), backend, [Work(task, 0) for task in TASKS[:3]], eval={"concurrency": 1})
    assert "task-0 #0: left out, its episode failed (data): image x is not there" in said
    assert [(failure.kind, failure.attempts) for failure in folder.failures] == [("data", 1)]
    assert set(folder.predictions) == {("task-1", 0), ("task-2", 0)}


@pytest.mark.parametrize(("problem", "kind"), [(GradingError("no tests"), "grading"), (DataError("no spec"), "data")])
def test_a_prediction_that_could_not_be_graded_is_kept_for_the_next_run(
    tmp_path: Path, problem: Exception, kind: str
) -> None:
    folder = EvaluationFolder(tmp_path)
    run(folder, ScriptedModel(), Backend(grading=[problem]), [Work(TASKS[0], 0)])
    assert [(failure.stage, failure.kind) for failure in folder.failures] == [("grading", kind)]
    assert [prediction.key for prediction in folder.ungraded()] == [("task-0", 0)]
    assert read_info(transcript_path(tmp_path, "task-0.0")).reward is None
    assert missing(folder, [("task-0", 0)]) == {kind: 1}


def test_a_bug_ends_the_run_instead_of_becoming_a_failure(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    with pytest.raises(ExceptionGroup) as raised:
        run(folder, ScriptedModel({"task-0": [KeyError("bug")]}), Backend(), [Work(TASKS[0], 0)])
    assert raised.value.subgroup(KeyError) is not None
    assert folder.failures == []


def test_sandboxes_are_asked_for_ahead_in_the_order_of_the_work(tmp_path: Path) -> None:
    backend = Backend()
    work = [Work(task, 0) for task in TASKS[:3]]
    run(EvaluationFolder(tmp_path), ScriptedModel(), backend, work, sandbox={"warm": 2}, eval={"concurrency": 1})
    assert backend.planned == [["task-0", "task-1", "task-2"], ["task-1", "task-2"], ["task-2"]]


def test_a_verdict_that_a_killed_run_did_not_write_into_its_transcript_is_mended(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    run(folder, ScriptedModel(), Backend(grading=[GradingError("no")]), [Work(TASKS[0], 0)])
    prediction = folder.predictions["task-0", 0]
    graded = Graded("task-0", 0, digest(prediction), "failed", 0.0, "failed", "1 of 2 differ", 1.0, flaky=True)
    folder.add_grade(graded)
    mend_last(EvaluationFolder(tmp_path))
    info = read_info(transcript_path(tmp_path, "task-0.0"))
    assert (info.reward, info.reason, info.outcome, info.flaky) == (0.0, "1 of 2 differ", "failed", True)


def test_failures_of_an_episode_that_was_made_up_for_are_not_missing(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    prediction = Prediction("task-0", "m", "x")
    folder.add_failure(Failure("task-0", 0, "episode", "engine", "", 3))
    folder.add_prediction(prediction)
    assert missing(folder, [("task-0", 0)]) == {"engine": 1}
    folder.add_grade(Graded("task-0", 0, digest(replace(prediction, sample=0)), "failed", 0.0, "failed", "", 0.0))
    assert missing(folder, [("task-0", 0)]) == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"agent": {"tools": ["hammer"]}}, "agent.tools: unknown tool 'hammer'"),
        ({"tasks": {"dataset": "nowhere.jsonl"}}, "nowhere.jsonl is not there"),
        ({"eval": {"gold": "nowhere"}}, "nowhere holds no evaluation of gold patches"),
        ({"model": {"path": "nowhere"}}, "model folder nowhere is not there"),
        (
            {"model": {"path": "{model}"}, "agent": {"max_tokens": 20}},
            r"its prompt has \d+ tokens, agent.max_tokens is 20",
        ),
        ({"model": {"path": "{model}"}, "engine": {"extra_args": ["--pp-size=2"]}}, "engine.extra_args: --pp-size"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written_or_started(
    tmp_path: Path, tiny_moe: Path, change: dict[str, dict[str, Any]], problem: str
) -> None:
    rows = tmp_path / "tasks.jsonl"
    rows.write_text(json.dumps(r2e_row()) + "\n")
    sections = {"tasks": {"dataset": str(rows)}, **change}
    if sections.get("model", {}).get("path") == "{model}":
        sections["model"] = {"path": str(tiny_moe)}
    out = tmp_path / "out"
    with pytest.raises(UserError, match=problem):
        preflight(config_of(**sections), out)
    assert not out.exists()

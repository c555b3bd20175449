"""Evaluations in training: every held task once, for the policy that is asked about, and training never notices."""

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from agent_r3.config import Config
from agent_r3.errors import ContractError
from agent_r3.metrics import METRICS
from agent_r3.rollout.worker import task_at
from agent_r3.statistics import wilson
from agent_r3.store import Delivery, GroupReader
from agent_r3.trainer.evaluation import Evaluator
from agent_r3.trainer.feed import Stopped
from agent_r3.types import MoEShape
from tests.support.rollout import ScriptedHeldSet, ScriptedRollout
from tests.support.trainer import GROUPS, Run, make_run, rewards
from tests.support.trajectories import SHAPE

HELD = {"one": [1.0, 0.0], "two": [0.0, 0.0], "three": [1.0, 1.0]}


def lines_of(run_folder: Path) -> list[dict[str, object]]:
    path = run_folder / "eval" / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stored(url: str, run: str) -> list[bytes]:
    """Keys of episodes that the store still holds."""
    client = redis.Redis.from_url(url)
    keys = [key for key in client.scan_iter(f"agent_r3:{{{run}}}:*") if b":traj:" in key or b":turns:" in key]
    client.close()
    return keys


@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_an_evaluation_cut_by_kill_9_is_taken_up_one_cut_by_sigterm_ends_and_training_is_as_without(
    straight_run: tuple[Run, ScriptedRollout], tiny_moe: Path, tiny_shape: MoEShape, trainer_store: str, tmp_path: Path
) -> None:
    run = make_run("evaluated", tiny_moe, trainer_store, tmp_path, held={"every": 1, "samples": 2})
    killed, stopped = 3 * len(HELD) + 1, 4 * len(HELD) + 1  # second groups of the evaluations after 3 and 4 steps
    with (
        ScriptedRollout(trainer_store, run.name, tiny_shape, rewards) as rollout,
        ScriptedHeldSet(trainer_store, run.loaded(), tiny_shape, HELD, held_back=(killed, stopped)) as held,
    ):
        process = run.start()
        run.wait_for(process, lambda: len(lines_of(run.folder)) == killed)
        run.kill(process)  # the checkpoint holds two steps, the engines have the policy after three
        held.held_back.remove(killed)
        process = run.start(resume=True)
        run.wait_for(process, lambda: len(lines_of(run.folder)) == stopped)
        process.send_signal(signal.SIGTERM)
        run.finish(process)
    assert [group.index for group in held.groups][:stopped] == list(range(stopped)), "none ran twice"
    counted = Counter((line["step"], line["index"], line["task_id"]) for line in lines_of(run.folder))
    assert counted == {(index // len(HELD), index, held.task_of(index)): 1 for index in range(stopped)}
    lines, straight = run.metrics(), straight_run[0].metrics()[:4]
    assert [(line["step"], line["eval/policy_version"], line["eval/pass@1"]) for line in lines] == [
        (step, step, 0.5) for step in range(4)
    ]
    for name in ("train/loss", "train/grad_norm", "r3/kl_replay", "rollout/tokens"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in straight])
    assert [(group.index, group.task_id) for group in rollout.groups] == [
        (group.index, group.task_id) for group in straight_run[1].groups[: 4 * GROUPS]
    ]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A training run's."""
    return Config.model_validate(
        {
            "run": {"name": "run", "dir": tmp_path},
            "model": {"path": "tiny"},
            "tasks": {"dataset": "offline"},
            "eval": {"every": 2, "samples": 2},
        }
    )


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def patience() -> None:
    """Called while waiting."""


def after(asked: int) -> Callable[[], None]:
    """Stops the run when it has waited so often."""
    left = [asked]

    def idle() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped

    return idle


def when(there: Callable[[], bool]) -> Callable[[], None]:
    """Stops the run once that is so."""

    def idle() -> None:
        if there():
            raise Stopped

    return idle


@contextmanager
def evaluator(
    url: str, held: ScriptedHeldSet, idle: Callable[[], None] = patience, reader: type[GroupReader] = GroupReader
) -> Iterator[Evaluator]:
    """As a trainer that starts now has it."""
    with reader.connect(url, held.config.run.name) as store:
        yield Evaluator(store, held.config, idle)


def test_every_held_task_is_asked_for_once_in_an_order_of_the_evaluations_own_seed(
    embedded_url: str, config: Config
) -> None:
    tasks = {f"task-{number}": [1.0, 1.0] for number in range(7)}
    with ScriptedHeldSet(embedded_url, config, SHAPE, tasks) as held, evaluator(embedded_url, held) as evaluations:
        for step, version in ((0, 0), (4, 3)):
            evaluations.evaluate(step, version, "weights")
    first, second = held.groups[:7], held.groups[7:]
    assert [group.index for group in first] == list(range(7)) and [g.index for g in second] == list(range(28, 35))
    assert {group.policy_version for group in first} == {0} and {g.policy_version for g in second} == {3}
    for groups in (first, second):
        assert sorted(group.task_id for group in groups) == sorted(tasks)
    of_training = [task_at(list(tasks), config.run.seed, index) for index in range(7)]  # type: ignore[arg-type]
    assert [group.task_id for group in first] != of_training
    assert stored(embedded_url, held.config.run.name) == []


def test_pass_at_1_has_its_interval_and_the_infrastructures_failures_are_left_out(
    embedded_url: str, config: Config
) -> None:
    tasks = {"solved": [1.0, 1.0], "failed": [0.0, 0.0], "half a reward": [0.5, 0.5], "lost": [], "half lost": [1.0]}
    with ScriptedHeldSet(embedded_url, config, SHAPE, tasks) as held, evaluator(embedded_url, held) as evaluations:
        found = evaluations.evaluate(0, 0, "weights")
    low, high = wilson(0.5, 4)
    assert found == {
        "eval/policy_version": 0,
        "eval/episodes": 7,
        "eval/tasks": 4,
        "eval/pass@1": 0.5,
        "eval/pass@1_se": 0.25,
        "eval/pass@1_low": pytest.approx(low),
        "eval/pass@1_high": pytest.approx(high),
        "eval/turns_mean": 2.0,
        "eval/infra/sandbox": 3,
    }
    assert {name.replace("sandbox", "<kind>") for name in found} == {name for name in METRICS if "eval/" in name}


def test_without_a_graded_episode_there_is_no_pass_at_1(embedded_url: str, config: Config) -> None:
    with (
        ScriptedHeldSet(embedded_url, config, SHAPE, {"lost": []}) as held,
        evaluator(embedded_url, held) as evaluations,
    ):
        found = evaluations.evaluate(0, 0, "weights")
    assert found == {"eval/policy_version": 0, "eval/episodes": 0, "eval/infra/sandbox": 2}


def test_a_group_of_another_policy_is_refused(embedded_url: str, config: Config) -> None:
    with (
        ScriptedHeldSet(embedded_url, config, SHAPE, HELD, version=3) as held,
        evaluator(embedded_url, held) as evaluations,
        pytest.raises(ContractError, match=r"comes from policy version 3, the trainer is at 0"),
    ):
        evaluations.evaluate(0, 0, "weights")


def test_workers_with_different_held_sets_are_refused(embedded_url: str, config: Config) -> None:
    class Repeating(ScriptedHeldSet):
        def task_of(self, index: int) -> str:
            return "one"

    with (
        Repeating(embedded_url, config, SHAPE, HELD) as held,
        evaluator(embedded_url, held) as evaluations,
        pytest.raises(ContractError, match=r"task one came twice; do all rollout workers have the same 3 tasks"),
    ):
        evaluations.evaluate(0, 0, "weights")


def test_waiting_for_a_worker_with_the_held_set_ends_when_the_run_is_stopped(embedded_url: str, config: Config) -> None:
    other = ScriptedHeldSet(embedded_url, config, SHAPE, HELD)  # not started: nobody announces the held set
    with evaluator(embedded_url, other, after(2)) as evaluations, pytest.raises(Stopped):
        evaluations.evaluate(0, 0, "weights")


def stop_in_the_middle(url: str, held: ScriptedHeldSet, step: int, version: int, folder: Path) -> None:
    """End an evaluation when it has one of its groups."""
    before = len(lines_of(folder))
    with (
        evaluator(url, held, when(lambda: len(lines_of(folder)) > before)) as evaluations,
        pytest.raises(Stopped),
    ):
        evaluations.evaluate(step, version, "weights")


def test_a_stopped_evaluation_goes_on_where_it_was(embedded_url: str, config: Config) -> None:
    with ScriptedHeldSet(embedded_url, config, SHAPE, HELD, held_back=[7]) as held:
        stop_in_the_middle(embedded_url, held, 2, 1, config.run.folder)
        held.held_back.clear()
        with evaluator(embedded_url, held) as evaluations:
            assert evaluations.known(2) is None
            assert evaluations.evaluate(2, 1, "weights")["eval/episodes"] == 6
    assert [group.index for group in held.groups] == [6, 7, 8]


def test_nothing_of_an_abandoned_evaluation_counts_or_stays(embedded_url: str, config: Config) -> None:
    with ScriptedHeldSet(embedded_url, config, SHAPE, HELD, held_back=[8]) as held:
        stop_in_the_middle(embedded_url, held, 2, 1, config.run.folder)
        held.held_back.clear()
        wait_until(lambda: len(held.groups) == 3)
        with evaluator(embedded_url, held) as evaluations:
            assert evaluations.evaluate(4, 2, "weights")["eval/episodes"] == 6
            assert evaluations.known(2) is None
    assert stored(embedded_url, held.config.run.name) == []
    assert [group.policy_version for group in held.groups] == [1] * 3 + [2] * 3


def test_an_evaluation_with_other_settings_starts_from_nothing(embedded_url: str, config: Config) -> None:
    with ScriptedHeldSet(embedded_url, config, SHAPE, HELD, held_back=[1]) as held:
        stop_in_the_middle(embedded_url, held, 0, 0, config.run.folder)
        held.held_back.clear()
        wait_until(lambda: len(held.groups) == 3)
    larger = config.model_copy(update={"eval": config.eval.model_copy(update={"samples": 3})})
    held = ScriptedHeldSet(embedded_url, larger, SHAPE, {task: [*found, 1.0] for task, found in HELD.items()})
    with evaluator(embedded_url, held) as evaluations:
        evaluations.take_up(lost_after=None)
        assert stored(embedded_url, held.config.run.name) == []
        with held:
            assert evaluations.evaluate(0, 0, "weights")["eval/episodes"] == 9
    assert len(lines_of(config.run.folder)) == 3


def test_a_result_whose_acknowledgement_was_lost_counts_once(embedded_url: str, config: Config) -> None:
    class Killed(GroupReader):
        def ack(self, deliveries: Sequence[Delivery]) -> None:
            raise Stopped

    with ScriptedHeldSet(embedded_url, config, SHAPE, HELD) as held:
        with evaluator(embedded_url, held, reader=Killed) as evaluations, pytest.raises(Stopped):
            evaluations.evaluate(0, 0, "weights")
        with evaluator(embedded_url, held) as evaluations:
            assert evaluations.evaluate(0, 0, "weights")["eval/episodes"] == 6
    counted = Counter(line["task_id"] for line in lines_of(config.run.folder))
    assert counted == dict.fromkeys(HELD, 1) and len(held.groups) == 3
    assert stored(embedded_url, held.config.run.name) == []


def test_a_finished_evaluation_is_known_unless_its_policy_is_lost(embedded_url: str, config: Config) -> None:
    with ScriptedHeldSet(embedded_url, config, SHAPE, HELD) as held:
        with evaluator(embedded_url, held) as evaluations:
            made = {step: evaluations.evaluate(step, step, "weights") for step in (0, 2)}
        with evaluator(embedded_url, held) as evaluations:
            assert {step: evaluations.known(step) for step in (0, 2, 4)} == {**made, 4: None}
            evaluations.take_up(lost_after=0)  # the trainer starts anew
            assert (evaluations.known(0), evaluations.known(2)) == (made[0], None)
            evaluations.evaluate(2, 2, "weights")
    assert [group.index for group in held.groups] == [0, 1, 2, 6, 7, 8, 6, 7, 8], "the same version, another policy"
    assert len(lines_of(config.run.folder)) == 6

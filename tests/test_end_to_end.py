"""The whole loop by its command, nothing scripted: containers, SGLang, store, Megatron and the tiny policy."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agent_r3.archive import check_trajectory, episode_step, list_episodes, read_episode, read_info
from agent_r3.metrics import read_metrics, trained
from agent_r3.tiny import SCRIPTS
from tests.support.training import COMMAND, HELD, Training, containers, trainings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EPISODES = 2 * 4 * len(SCRIPTS)


def still_running(processes: list[psutil.Process]) -> list[str]:
    """Command lines of those that have not ended within 20 s. An ended orphan may wait for init to collect it."""
    _, there = psutil.wait_procs(processes, timeout=20)
    alive = []
    for process in there:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(" ".join(process.cmdline()))
    return alive


@pytest.fixture
def train(tiny_policy: None, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    with trainings(tmp_path) as start:
        yield start


@pytest.fixture
def finished(finished_training: Training) -> Training:
    return finished_training


Ids = tuple[int, ...]


def requests_seen(logs: Path) -> set[tuple[Ids, Ids]]:
    """(ids in, ids out) of every request that SGLang finished, as it logged them itself."""
    seen: set[tuple[Ids, Ids]] = set()
    for log in logs.glob("engine-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if '"request.finished"' in line:
                record = json.loads(line[line.index("{") :])
                seen.add((tuple(record["obj"]["input_ids"]), tuple(record["out"]["output_ids"])))
    return seen


def test_a_run_is_exact_from_the_engines_record_to_the_summary(finished: Training) -> None:
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["episodes"] == EPISODES
    assert summary["r3_coverage"] == 1.0
    assert summary["rows_missing"] == 0 and summary["reprefilled_tokens"] == 0
    assert summary["infra_failures"] == {}
    assert 0 < summary["cached_tokens"] < summary["prompt_tokens"]
    assert 0 < summary["kl_replay"] < 1e-3 and summary["kl_native"] > 0
    assert set(summary["wall_s"]) >= {"rollout", "update", "push"}
    assert (finished.folder / "report.html").stat().st_size > 10_000
    assert any((finished.folder / "tensorboard").iterdir())

    seen = requests_seen(finished.folder / "logs")
    episodes = [read_episode(path) for path in list_episodes(finished.folder)]
    assert len(episodes) == EPISODES
    for episode in episodes:
        check_trajectory(episode)
        tokens = tuple(episode.trajectory.tokens.tolist())
        for turn in episode.info.turns:
            sent = turn.start + turn.prompt
            assert (tokens[:sent], tokens[sent : sent + turn.sampled]) in seen
        assert len(tokens) == sent + turn.sampled, "the last turn's input and output are the whole trajectory"
    assert containers("finished") == []


def test_the_exported_trajectory_is_what_the_engine_saw_in_its_last_turn(finished: Training) -> None:
    seen = requests_seen(finished.folder / "logs")
    listed = subprocess.run(
        [*COMMAND, "trajectory", "list", str(finished.folder), "--json"], check=True, capture_output=True, text=True
    )
    first = json.loads(listed.stdout.splitlines()[0])
    out = finished.folder / "episode.json"
    subprocess.run([*COMMAND, "trajectory", "export", str(finished.folder), first["id"], "--out", str(out)], check=True)
    episode = json.loads(out.read_text())
    last = episode["turns"][-1]
    cut = last["start"] + last["prompt"]
    assert (tuple(episode["token_ids"][:cut]), tuple(episode["token_ids"][cut:])) in seen
    assert episode["rows_shape"][0] == len(episode["token_ids"]) - 1
    sampled = sum(turn["sampled"] for turn in episode["turns"])
    assert sum(episode["loss_mask"]) == sampled == sum(value != 0 for value in episode["logprobs"])


def test_a_finished_run_goes_on_with_resume_and_more_steps(finished: Training) -> None:
    metrics = read_metrics(finished.folder)
    assert [line["step"] for line in metrics if trained(line)] == [0, 1]
    assert metrics[1]["rollout/reprefilled_tokens"] == 0 and metrics[1]["r3/coverage"] == 1.0
    groups = sorted(read_info(path).group_id for path in list_episodes(finished.folder))
    assert groups == sorted(f"g{index:06d}" for index in range(2 * len(SCRIPTS)) for _ in range(4))


def test_the_policy_is_evaluated_on_the_held_set_before_the_steps_and_after_each(finished: Training) -> None:
    seen = requests_seen(finished.folder / "logs")
    metrics = read_metrics(finished.folder)
    assert [(line["step"], line["eval/policy_version"], line["eval/episodes"]) for line in metrics] == [
        (step, step, len(HELD)) for step in (0, 1, 2)
    ]
    episodes = [(episode_step(path), read_episode(path)) for path in list_episodes(finished.folder / "eval")]
    assert sorted((version, episode.info.task_id) for version, episode in episodes) == [
        (version, task) for version in (0, 1, 2) for task in HELD
    ]
    for version, episode in episodes:
        check_trajectory(episode)
        assert {turn.policy_version for turn in episode.info.turns} == {version}
        last = episode.info.turns[-1]
        tokens, cut = tuple(episode.trajectory.tokens.tolist()), last.start + last.prompt
        assert (tokens[:cut], tokens[cut:]) in seen
    for line in metrics:
        rewards = [episode.info.reward for version, episode in episodes if version == line["step"]]
        assert line["eval/pass@1"] == sum(reward == 1 for reward in rewards) / len(HELD)
        assert line["eval/pass@1_low"] <= line["eval/pass@1"] <= line["eval/pass@1_high"]
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert [found["pass@1"] for found in summary["evaluations"]] == [line["eval/pass@1"] for line in metrics]
    assert "Pass@1 on the held set" in (finished.folder / "report.html").read_text()


def test_an_engine_killed_in_mid_run_is_replaced_and_no_failure_becomes_a_reward(
    train: Callable[..., Training],
) -> None:
    training = train("killed")
    training.wait_for("first step", lambda: len(read_metrics(training.folder)) >= 1)
    os.kill(training.descendants("agent_r3.rollout.sglang_server")[0].pid, signal.SIGKILL)
    assert training.finish() == 0, training.output()
    assert "restart 1 of" in training.output()
    metrics = read_metrics(training.folder)
    assert [line["step"] for line in metrics] == [0, 1]
    assert sum(line["rollout/episodes"] for line in metrics) == EPISODES
    assert metrics[-1]["r3/coverage"] == 1.0
    assert containers("killed") == []


def test_ctrl_c_stops_and_removes_everything(train: Callable[..., Training]) -> None:
    training = train("stopped")
    training.wait_for("containers", lambda: len(containers("stopped")) > 0)
    everyone = psutil.Process(training.process.pid).children(recursive=True)
    training.process.send_signal(signal.SIGINT)
    assert training.finish(90) == 130, training.output()
    assert containers("stopped") == []
    assert still_running(everyone) == []
    assert "Traceback" not in training.output()


def test_a_killed_supervisor_takes_every_process_with_it(train: Callable[..., Training]) -> None:
    training = train("orphaned")
    training.wait_for("containers", lambda: len(containers("orphaned")) > 0)
    everyone = psutil.Process(training.process.pid).children(recursive=True)
    os.kill(training.process.pid, signal.SIGKILL)
    assert still_running(everyone) == []
    again = train("orphaned", "train.steps=1")
    assert again.finish() == 2, "the run folder is there; the user must say what to do with it"

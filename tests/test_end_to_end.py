"""The whole loop by its command, nothing scripted: containers, SGLang, store, Megatron and the tiny policy."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest

from agent_r3.archive import check_trajectory, list_episodes, read_episode, read_info
from agent_r3.metrics import read_metrics
from agent_r3.tiny import SCRIPTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "agent_r3.cli"]
# SGLang's own record of every request: ids in, ids out.
RECORD = "engine.extra_args=[--log-requests, --log-requests-level, '3', --log-requests-format, json]"
SMALL = ("train.steps=2", "train.diagnostics_trajectories=8", "rollout.samples_per_task=4")
EPISODES = 2 * 4 * len(SCRIPTS)


@dataclass(frozen=True)
class Training:
    """`agent-r3 train configs/tiny-cpu.yaml` as a process."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for(self, what: str, there: Callable[[], bool], timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not there():
            assert self.process.poll() is None, f"ended before {what}: {self.output()}"
            assert time.monotonic() < deadline, f"no {what} after {timeout_s} s: {self.output()}"
            time.sleep(0.2)

    def finish(self, timeout_s: float = 400) -> int:
        return self.process.wait(timeout=timeout_s)

    def output(self) -> str:
        return (self.folder.parent / f"{self.folder.name}.out").read_text()

    def descendants(self, containing: str) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if containing in " ".join(child.cmdline())]


def run_name(label: str) -> str:
    """Containers are found by their run's name, so it is this test session's own."""
    return f"{label}-{os.getpid()}"


def containers(label: str) -> list[object]:
    client = docker.from_env()
    try:
        return list(client.containers.list(all=True, filters={"label": f"agent_r3.run={run_name(label)}"}))
    finally:
        client.close()


def still_running(processes: list[psutil.Process]) -> list[str]:
    """Command lines of those that have not ended within 20 s. An ended orphan may wait for init to collect it."""
    _, there = psutil.wait_procs(processes, timeout=20)
    alive = []
    for process in there:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(" ".join(process.cmdline()))
    return alive


@pytest.fixture(scope="module")
def tiny_policy() -> None:
    """The tasks and the policy that the demo makes; kept in the user's cache."""
    only = [part for task in SCRIPTS for part in ("--only", task)]
    subprocess.run([*COMMAND, "tasks", "build", "offline", *only], check=True)
    subprocess.run([*COMMAND, "model", "tiny"], check=True)


@contextlib.contextmanager
def trainings(folder: Path) -> Iterator[Callable[..., Training]]:
    """Starts runs in `folder`; those that still go on at the end are stopped."""
    started: list[Training] = []

    def start(label: str, *overrides: str) -> Training:
        name = run_name(label)
        out = (folder / f"{name}.out").open("w")
        command = [
            *COMMAND,
            "train",
            str(ROOT / "configs" / "tiny-cpu.yaml"),
            f"run.name={name}",
            f"run.dir={folder}",
        ]
        process = subprocess.Popen([*command, *SMALL, *overrides], stdout=out, stderr=subprocess.STDOUT, text=True)
        started.append(Training(process, folder / name))
        return started[-1]

    yield start
    for training in started:
        if training.process.poll() is None:
            training.process.send_signal(signal.SIGINT)
            training.process.wait(timeout=60)


@pytest.fixture
def train(tiny_policy: None, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    with trainings(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def finished(tiny_policy: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run of two steps in two goes: one step, then `--resume` with one more. SGLang recorded every request."""
    with trainings(tmp_path_factory.mktemp("finished")) as start:
        first = start("finished", RECORD, "train.steps=1")
        assert first.finish() == 0, first.output()
        again = start("finished", RECORD, "train.steps=2", "--resume")
        assert again.finish() == 0, again.output()
        yield again


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
    assert [line["step"] for line in metrics] == [0, 1]
    assert metrics[1]["rollout/reprefilled_tokens"] == 0 and metrics[1]["r3/coverage"] == 1.0
    groups = sorted(read_info(path).group_id for path in list_episodes(finished.folder))
    assert groups == sorted(f"g{index:06d}" for index in range(2 * len(SCRIPTS)) for _ in range(4))


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

"""The tiny policy before and after a short training, evaluated by the command with a real SGLang, and compared."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_r3.archive import list_episodes, read_info
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.tiny import SCRIPTS
from tests.support.training import COMMAND, CONFIG, Training, containers, own_name

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SAMPLES = 4
EPISODES = SAMPLES * len(SCRIPTS)


def command(out: Path, *overrides: str) -> list[str]:
    settings = (f"run.name={own_name('evaluated')}", f"eval.samples={SAMPLES}", "eval.concurrency=8", "sandbox.warm=8")
    return [*COMMAND, "eval", str(CONFIG), *settings, *overrides, "--out", str(out)]


@pytest.fixture(scope="module")
def before(tiny_policy: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy of the demo. Its engine is killed when two predictions are there."""
    out = tmp_path_factory.mktemp("evaluations") / "before"
    log = out.with_suffix(".out")
    with log.open("w") as file, subprocess.Popen(command(out), stdout=file, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 240
        while len(EvaluationFolder(out).predictions) < 2:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        engine = next(child for child in children if "agent_r3.rollout.sglang_server" in " ".join(child.cmdline()))
        os.kill(engine.pid, signal.SIGKILL)
        assert process.wait(timeout=400) == 0, log.read_text()
    return out


@pytest.fixture(scope="module")
def after(finished_training: Training, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two steps of training made of it."""
    weights = sorted((finished_training.folder / "weights").iterdir())[-1]
    out = tmp_path_factory.mktemp("evaluations") / "after"
    done = subprocess.run(command(out, f"model.path={weights}"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def report_of(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_every_episode_of_a_policy_is_graded_also_when_its_engine_dies_in_mid_run(before: Path) -> None:
    folder = EvaluationFolder(before)
    assert set(folder.predictions) == {(task_id, sample) for task_id in SCRIPTS for sample in range(SAMPLES)}
    assert folder.ungraded() == [] and folder.failures == []
    report = report_of(before)
    assert report["infrastructure"]["failures"] == report["infrastructure"]["mended"] > 0
    assert report["pass_at_1"]["samples"] == EPISODES
    resolved = sum(graded.verdict == "resolved" for graded in folder.grades.values())
    assert report["pass_at_1"]["mean"] == pytest.approx(resolved / EPISODES)
    assert 0 < resolved < EPISODES, "the warm-started policy solves a part of its tasks"
    for prediction in folder.predictions.values():
        facts = prediction.episode
        assert facts is not None and facts.turns >= 1 and facts.sampled_tokens > 0
        assert facts.seconds["generate"] + facts.seconds["tools"] <= facts.seconds["total"]
    assert containers("evaluated") == []


def test_the_transcripts_of_a_policy_are_whole_and_nothing_was_computed_twice(after: Path) -> None:
    folder = EvaluationFolder(after)
    infos = [read_info(path) for path in list_episodes(after)]
    assert len(infos) == EPISODES
    for info in infos:
        assert info.reward is not None and info.reprefilled_tokens == 0
        starts = [turn.start for turn in info.turns]
        ends = [turn.start + turn.prompt + turn.sampled for turn in info.turns]
        assert starts == [0, *ends[:-1]]
    rewards = sorted(info.reward for info in infos if info.reward is not None)
    assert rewards == sorted(graded.reward for graded in folder.grades.values())


def test_the_comparison_gives_the_difference_of_the_two_reports_with_an_interval_around_it(
    before: Path, after: Path
) -> None:
    done = subprocess.run(
        [*COMMAND, "eval", "compare", str(before), str(after), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    comparison = json.loads(done.stdout)
    gain = report_of(after)["pass_at_1"]["mean"] - report_of(before)["pass_at_1"]["mean"]
    difference = comparison["difference"]
    assert difference["mean"] == pytest.approx(gain)
    # Two steps teach little: the gain of this short run may be of either sign.
    assert difference["low"] is None or difference["low"] <= gain <= difference["high"]
    for page in (before / "report.html", after / "report.html", after / "compare.html"):
        assert "<svg" in page.read_text() or "data:image" in page.read_text()

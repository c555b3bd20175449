"""The trainer as a service: it joins the run again wherever that stands, and shows what it does."""

import signal
import time
from pathlib import Path

import pytest
import torch

from agent_r3.cli.trainer import trainer
from agent_r3.store import GroupReader
from agent_r3.trainer.role import standing
from agent_r3.types import MoEShape
from tests.support.rollout import ScriptedRollout
from tests.support.telemetry import fetch, free_port, key, scrape
from tests.support.trainer import GROUPS, STEPS, Run, make_run, rewards

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

NOWHERE = "engine.urls=[http://127.0.0.1:1]"


def test_killed_before_its_first_checkpoint_it_loses_no_group_and_trains_none_twice(
    straight_run: tuple[Run, ScriptedRollout],
    tiny_moe: Path,
    tiny_shape: MoEShape,
    trainer_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, port = make_run("early", tiny_moe, trainer_store, tmp_path), free_port()
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("AGENT_R3__SERVICE__PORT", str(port))
    assert standing(run.loaded()) == "new"
    with (
        ScriptedRollout(trainer_store, run.name, tiny_shape, rewards) as rollout,
        GroupReader.connect(trainer_store, run.name, consumer="test") as reader,
    ):
        process = run.start()
        run.wait_for_step(process, 0)
        run.kill(process)
        assert not list((run.folder / "checkpoints").glob("step_*")) and standing(run.loaded()) == "going_on"
        process = run.start(resume=True)
        run.wait_for(process, lambda: fetch(f"{url}/healthz") == (503, "starting\n"))
        run.wait_for(process, lambda: fetch(f"{url}/healthz") == (200, "ok\n"))
        run.wait_for_step(process, 1)
        found = scrape(url)
        assert found[key("agent_r3_up", role="trainer", run="early")] == 1
        assert found[key("agent_r3_step")] >= 1 and found[key("agent_r3_policy_version")] >= 1
        assert found[key("agent_r3_metric", name="train/reward_mean")] > 0
        assert found[key("agent_r3_metric", name="r3/coverage")] == 1
        assert found[key("agent_r3_step_seconds", stage="update")] > 0
        run.finish(process)
        payload = reader.roles()["trainer"].payload
    assert (payload["state"], payload["step"], payload["policy_version"]) == ("done", STEPS, STEPS)
    assert sorted(group.index for group in rollout.groups) == list(range(STEPS * GROUPS))
    assert [line["step"] for line in run.metrics()] == list(range(STEPS)) and standing(run.loaded()) == "done"
    for name, tensor in straight_run[0].weights().items():
        torch.testing.assert_close(run.weights()[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def test_a_run_that_has_made_its_steps_is_reported_and_left_alone(
    straight_run: tuple[Run, ScriptedRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = straight_run
    before = (run.folder / "metrics.jsonl").stat().st_mtime_ns
    began = time.monotonic()
    trainer(run.config, [NOWHERE], rejoin=True)
    assert time.monotonic() - began < 30
    assert (run.folder / "report.html").is_file() and (run.folder / "summary.json").is_file()
    assert (run.folder / "metrics.jsonl").stat().st_mtime_ns == before
    monkeypatch.setenv("AGENT_R3__TRAIN__STEPS", str(STEPS + 1))
    assert standing(run.loaded()) == "going_on"


def test_a_stopped_trainer_says_so(tiny_moe: Path, tiny_shape: MoEShape, trainer_store: str, tmp_path: Path) -> None:
    run = make_run("stopped", tiny_moe, trainer_store, tmp_path)
    with (
        ScriptedRollout(trainer_store, run.name, tiny_shape, rewards),
        GroupReader.connect(trainer_store, run.name, consumer="test") as reader,
    ):
        process = run.start()
        run.wait_for_step(process, 0)
        process.send_signal(signal.SIGTERM)
        run.finish(process)
        payload = reader.roles()["trainer"].payload
    assert payload["state"] == "stopped" and 1 <= int(str(payload["step"])) < STEPS
    assert list((run.folder / "checkpoints").glob("step_*")) and standing(run.loaded()) == "going_on"

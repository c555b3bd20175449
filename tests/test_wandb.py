"""Figures on Weights & Biases, with the real package writing files offline; nothing of a run depends on it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_r3.config import Config, TrackConfig, dump_config
from agent_r3.errors import UserError
from agent_r3.metrics import read_metrics
from agent_r3.tracking import check_tracking, public_settings
from agent_r3.types import MoEShape
from tests.support.rollout import ScriptedRollout
from tests.support.trainer import make_run, rewards

# A trainer's attempt: write steps FIRST to LAST with losses of SCALE, as rank 0 does, and do what THEN says.
ATTEMPT = """
import os, signal, sys
from pathlib import Path
from agent_r3.config import TrackConfig
from agent_r3.errors import UserError
from agent_r3.metrics import MetricsWriter, setup_logging
from agent_r3.tracking import WandbBoard

folder, mode, first, last, scale, then = sys.argv[1:]
setup_logging()
try:
    board = WandbBoard(Path(folder), TrackConfig(wandb=True, wandb_mode=mode), {"lr": 1e-6})
except UserError as exc:
    print("refused:", exc)
    sys.exit(2)
with MetricsWriter(Path(folder), first_step=int(first), wandb=board) as metrics:
    for step in range(int(first), int(last) + 1):
        if then == "lose the service" and step == int(last):
            for task in Path("/proc/self/task").iterdir():
                for child in (task / "children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
        metrics.write(step, {"train/loss": float(scale) * step, "r3/kl_native": float("nan")})
    if then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "fail":
        raise RuntimeError("the trainer fails")
"""


def attempt(
    folder: Path, first: int, last: int, *, scale: float = 1, then: str = "end", mode: str = "offline"
) -> "subprocess.CompletedProcess[str]":
    """Run it with a home of its own and no W&B key."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | {"HOME": str(home)}
    command = [sys.executable, "-c", ATTEMPT, str(folder), mode, str(first), str(last), str(scale), then]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


def records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file, which is a LevelDB log with a header of 7 bytes. A torn end is left out."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32_768 - at % 32_768
        if left < 7:  # the rest of a block that no header fits into
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def attempts(folder: Path) -> list[list[Any]]:
    """The records of each attempt, the earliest first."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    return [list(records(path)) for path in files]


def run_of(attempt: list[Any]) -> Any:
    return next(record.run for record in attempt if record.HasField("run"))


def history(attempt: list[Any]) -> list[dict[str, Any]]:
    """What was logged, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in attempt
        if record.HasField("history")
    ]


def losses(attempt: list[Any]) -> list[tuple[int, float]]:
    return [(line["step"], line["train/loss"]) for line in history(attempt)]


def exit_code(attempt: list[Any]) -> int | None:
    return next((record.exit.exit_code for record in attempt if record.HasField("exit")), None)


def test_every_step_is_on_wandb_with_the_figures_of_metrics_jsonl(tmp_path: Path) -> None:
    done = attempt(tmp_path / "demo", 0, 2)
    assert done.returncode == 0, done.stderr
    (only,) = attempts(tmp_path / "demo")
    assert losses(only) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert all("r3/kl_native" in line for line in history(only))
    run = run_of(only)
    assert (run.project, run.display_name) == ("agent-r3", "demo")
    assert run.run_id == (tmp_path / "demo" / "wandb-id").read_text().strip()
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["lr"] == 1e-6
    metrics = [record.metric for record in only if record.HasField("metric")]
    assert "step" in [metric.step_metric for metric in metrics if metric.glob_name == "*"]
    assert exit_code(only) == 0


def test_a_resumed_run_keeps_its_id_and_steps_made_again_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    for done in (attempt(folder, 0, 3), attempt(folder, 2, 4, scale=10)):
        assert done.returncode == 0, done.stderr
    before, after = attempts(folder)
    assert run_of(before).run_id == run_of(after).run_id
    assert losses(before) == [(step, float(step)) for step in range(4)]
    assert losses(after) == [(2, 20.0), (3, 30.0), (4, 40.0)]
    assert [line["train/loss"] for line in read_metrics(folder)] == [0, 1, 20, 30, 40]


def test_a_killed_run_goes_on_under_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert attempt(folder, 0, 400, then="die").returncode == -9
    resumed = attempt(folder, 200, 201, scale=10)
    assert resumed.returncode == 0, resumed.stderr
    before, after = attempts(folder)
    assert run_of(before).run_id == run_of(after).run_id
    written = losses(before)  # offline, a kill loses what W&B's process had not written: less than 32 KiB
    assert len(written) > 200 and written == [(step, float(step)) for step in range(len(written))]
    assert losses(after) == [(200, 2000.0), (201, 2010.0)]


def test_a_trainer_that_fails_is_failed_on_wandb(tmp_path: Path) -> None:
    done = attempt(tmp_path / "demo", 0, 1, then="fail")
    assert done.returncode == 1 and "the trainer fails" in done.stderr
    (only,) = attempts(tmp_path / "demo")
    assert exit_code(only) == 1


def test_when_wandb_dies_the_run_goes_on_without_it(tmp_path: Path) -> None:
    done = attempt(tmp_path / "demo", 0, 5, then="lose the service")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the run goes on without W&B") == 1
    assert [line["step"] for line in read_metrics(tmp_path / "demo")] == list(range(6))


def test_without_a_key_the_first_start_is_refused_and_a_run_that_was_there_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    refused = attempt(folder, 0, 1, mode="online")
    assert refused.returncode == 2, refused.stderr
    assert refused.stdout.startswith("refused: track.wandb: W&B cannot be begun: ") and refused.stdout.count("\n") == 1
    assert not (folder / "wandb-id").exists()
    assert attempt(folder, 0, 1).returncode == 0
    goes_on = attempt(folder, 2, 3, mode="online")
    assert goes_on.returncode == 0 and "the run goes on without W&B" in goes_on.stderr
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 3]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.metadata

    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    check_tracking(TrackConfig())
    with pytest.raises(UserError, match=r"^track\.wandb needs the package wandb; `pip install agent-r3\[wandb\]`$"):
        check_tracking(TrackConfig(wandb=True))
    with pytest.raises(UserError, match=r"^track\.otlp_endpoint needs the package opentelemetry.*agent-r3\[otel\]`$"):
        check_tracking(TrackConfig(otlp_endpoint="http://collector:4318"))


def test_no_password_of_the_store_goes_to_wandb() -> None:
    config = Config.model_validate(
        {"model": {"path": "x"}, "tasks": {"dataset": "offline"}, "store": {"url": "redis://:secret@host:1"}}
    )
    settings = public_settings(config)
    assert "secret" not in json.dumps(settings) and settings["train"]["lr"] == config.train.lr


@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_a_trainer_whose_config_asks_for_it_writes_its_steps_to_wandb(
    tiny_moe: Path, tiny_shape: MoEShape, trainer_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):  # not in the home of who tests
        monkeypatch.setenv(name, str(tmp_path / name))
    run = make_run("tracked", tiny_moe, trainer_store, tmp_path)
    config = run.loaded()
    track = TrackConfig(wandb=True, wandb_mode="offline", wandb_project="a-project")
    train = config.train.model_copy(update={"steps": 2})
    run.config.write_text(dump_config(config.model_copy(update={"track": track, "train": train})))
    with ScriptedRollout(trainer_store, run.name, tiny_shape, rewards):
        run.finish(run.start())
    (only,) = attempts(run.folder)
    assert run_of(only).project == "a-project"
    assert [{**line, "time": 0} for line in run.metrics()] == [
        {**{name: value for name, value in line.items() if not name.startswith("_")}, "time": 0}
        for line in history(only)
    ]

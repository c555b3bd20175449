"""metrics.jsonl and TensorBoard: every step once, also after a resume; logging in its three forms."""

import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r3.errors import ContractError, UserError
from agent_r3.metrics import METRICS, MetricsWriter, read_metrics


def written(folder: Path, first: int, steps: list[int], value: float = 1.0) -> None:
    with MetricsWriter(folder, first_step=first) as metrics:
        for step in steps:
            metrics.write(step, {"train/loss": value * step})


def test_a_step_is_one_json_line_with_step_and_time(tmp_path: Path) -> None:
    written(tmp_path, 0, [0, 1, 2])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert all(isinstance(line["step"], int) and line["time"] > 1.6e9 for line in lines)


def test_a_resumed_run_holds_each_step_once_and_the_later_attempt_counts(tmp_path: Path) -> None:
    written(tmp_path, 0, [0, 1, 2, 3])
    written(tmp_path, 2, [2, 3, 4], value=10)
    assert [(s["step"], s["train/loss"]) for s in read_metrics(tmp_path)] == [(0, 0), (1, 1), (2, 20), (3, 30), (4, 40)]


def test_steps_go_forward_only(tmp_path: Path) -> None:
    written(tmp_path, 0, [0])
    with MetricsWriter(tmp_path, first_step=1) as metrics:
        with pytest.raises(ContractError, match="step 0 after step 0"):
            metrics.write(0, {})
        metrics.write(1, {})
        with pytest.raises(ContractError, match="step 1 after step 1"):
            metrics.write(1, {})


def test_not_a_number_and_infinity_stay_visible_in_valid_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, first_step=0) as metrics:
        metrics.write(0, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": -math.inf})
    line = (tmp_path / "metrics.jsonl").read_text()
    parsed = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert parsed["train/grad_norm"] == "inf"
    values = read_metrics(tmp_path)[0]
    assert math.isnan(values["train/loss"])
    assert values["train/grad_norm"] == math.inf and values["train/lr"] == -math.inf


def test_a_line_cut_by_a_kill_is_left_out_and_the_resumed_run_goes_on(tmp_path: Path) -> None:
    written(tmp_path, 0, [0, 1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
    assert [step["step"] for step in read_metrics(tmp_path)] == [0, 1]
    written(tmp_path, 2, [2])
    assert [step["step"] for step in read_metrics(tmp_path)] == [0, 1, 2]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)


def test_a_run_without_metrics_has_no_steps(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_tensorboard_shows_the_same_figures_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(tmp_path, 0, [0, 1, 2, 3])
    written(tmp_path, 2, [2, 3, 4], value=10)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0), (1, 1), (2, 20), (3, 30), (4, 40)]


def test_writing_metrics_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agent_r3.metrics import MetricsWriter\n"
        "with MetricsWriter(Path(sys.argv[1]), first_step=0) as m: m.write(0, {'train/loss': 1.0})\n"
        "print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_every_metric_is_explained() -> None:
    for name, (_, meaning) in METRICS.items():
        assert name.split("/")[0] in ("train", "eval", "rollout", "r3", "perf"), name
        assert meaning


LOG = (
    "import logging, structlog; from agent_r3.metrics import setup_logging; setup_logging()\n"
    "log = structlog.get_logger('agent_r3.x'); log.info('hello there', group=3); log.debug('hidden')\n"
    "logging.getLogger('foreign').info('hidden'); logging.getLogger('foreign').warning('careful')\n"
)


def logged(mode: str, terminal: bool = False) -> str:
    env = {**os.environ, "AGENT_R3_LOG": mode}
    if not terminal:
        return subprocess.run([sys.executable, "-c", LOG], check=True, capture_output=True, text=True, env=env).stderr
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", LOG], check=True, stderr=theirs, env={**env, "TERM": "xterm"})
    os.close(theirs)
    text = os.read(ours, 65_536).decode()
    os.close(ours)
    return text


def test_logs_are_plain_key_value_lines_away_from_a_terminal() -> None:
    first, second = logged("").splitlines()
    assert "level='info' event='hello there' group=3" in first
    assert "level='warning' event='careful'" in second
    assert "\x1b" not in first


def test_logs_are_json_lines_when_asked() -> None:
    first, second = (json.loads(line) for line in logged("json").splitlines())
    assert (first["level"], first["event"], first["group"]) == ("info", "hello there", 3)
    assert second["event"] == "careful"


def test_logs_are_coloured_on_a_terminal() -> None:
    text = logged("", terminal=True)
    assert "hello there" in text and "\x1b[" in text and "hidden" not in text

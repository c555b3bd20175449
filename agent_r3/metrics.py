"""Metric names, `metrics.jsonl` with TensorBoard beside it, and logging. One line a step; names with slashes.

Line s is step s, counted from 0. Its `eval/*` are of the policy that the step started from, the one that its episodes
were sampled with. The policy after the last step stands in a line of its own after that step's, without `train/*`.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from agent_r3.errors import ContractError, UserError, boundary
from agent_r3.tracking import WandbBoard

METRICS: dict[str, tuple[str, str]] = {
    # name: (unit, meaning). `<...>` stands for any value of that kind.
    "train/reward_mean": ("reward", "mean reward of every episode sampled for the step (training reward)"),
    "train/loss": ("", "policy loss, mean over the step's optimizer steps"),
    "train/grad_norm": ("", "gradient norm before clipping"),
    "train/entropy": ("nat", "mean entropy of the policy on sampled tokens"),
    "train/clip_fraction": ("share", "sampled tokens whose ratio was clipped"),
    "train/ppo_kl": ("nat", "mean log-prob change against the step's old policy"),
    "train/loss_tokens": ("tokens", "sampled tokens in the loss"),
    "train/lr": ("", "learning rate"),
    "train/groups_kept": ("groups", "groups with unequal rewards, trained on"),
    "train/groups_equal": ("groups", "groups of equal rewards, without a gradient"),
    "train/refills": ("rounds", "rounds of further groups sampled to replace equal ones"),
    "rollout/episodes": ("episodes", "episodes that finished and were graded"),
    "rollout/turns_mean": ("turns", "mean turns of an episode"),
    "rollout/tokens": ("tokens", "tokens of all trajectories, prompts and observations included"),
    "rollout/sampled_tokens": ("tokens", "tokens that the policy sampled"),
    "rollout/prompt_tokens": ("tokens", "tokens sent to the engine, summed over turns"),
    "rollout/cached_tokens": ("tokens", "of those, served from the prefix cache"),
    "rollout/reprefilled_tokens": ("tokens", "tokens of earlier turns that the engine computed again"),
    "rollout/ending/<ending>": ("episodes", "episodes that ended so"),
    "rollout/infra/<kind>": ("failures", "infrastructure failures of that kind; never a reward"),
    "rollout/seconds/<stage>": ("s", "seconds of a stage of an episode, summed over the step's episodes"),
    "rollout/grade/<outcome>": ("episodes", "episodes graded so: passed, failed, unapplied, timeout, tampered, ..."),
    "rollout/graded_runs": ("runs", "hidden-test runs; equal patches share one"),
    "r3/coverage": ("share", "routing rows present of those needed (T-1 a trajectory)"),
    "r3/rows_missing": ("rows", "routing rows needed but absent"),
    "r3/fallback_fraction": ("share", "routers of trained tokens replayed without a recorded row"),
    "r3/mixed_version_fraction": ("share", "trajectories with tokens of more than one policy version"),
    "r3/bytes_per_token": ("B/token", "stored size of the routing rows"),
    "r3/kl_replay": ("nat", "KL(rollout || train) estimate mean(r - 1 - log r), trainer replaying the rollout's rows"),
    "r3/kl_native": ("nat", "the same on the same tokens, trainer routing by itself"),
    "r3/f2_replay": ("share", "F(2): tokens with max(r, 1/r) > 2, with replay"),
    "r3/f2_native": ("share", "the same without replay"),
    "r3/abs_dlogp_replay": ("nat", "mean |log r| with replay"),
    "r3/abs_dlogp_native": ("nat", "the same without replay"),
    "r3/max_ratio_replay": ("ratio", "largest max(r, 1/r) with replay"),
    "r3/max_ratio_native": ("ratio", "the same without replay"),
    "r3/mismatch_routers": ("share", "(token, layer) routers whose natural expert set differs from the recorded one"),
    "r3/mismatch_tokens": ("share", "tokens with at least one such router"),
    "r3/mismatch_sequences": ("share", "trajectories with at least one such token"),
    "r3/diagnosed_tokens": ("tokens", "sampled tokens the figures above are means over; weighs a step when pooled"),
    "eval/pass@1": ("share", "held-set episodes that resolved their task, mean over tasks; before the step"),
    "eval/pass@1_se": ("share", "its standard error, clustered by task"),
    "eval/pass@1_low": ("share", "lower bound of its 95% interval"),
    "eval/pass@1_high": ("share", "upper bound of its 95% interval"),
    "eval/tasks": ("tasks", "tasks of the held set with a graded episode"),
    "eval/episodes": ("episodes", "held-set episodes that finished and were graded"),
    "eval/turns_mean": ("turns", "mean turns of such an episode"),
    "eval/infra/<kind>": ("failures", "infrastructure failures during the evaluation; never a verdict"),
    "eval/policy_version": ("", "policy version that was evaluated"),
    "train/policy_version": ("", "policy version after the step"),
    "train/optimizer_steps": ("steps", "optimizer steps made"),
    "train/skipped_steps": ("steps", "1 when a step had no group to train on"),
    "perf/<stage>_s": ("s", "wall time of a stage of the trainer's step; it waits for rollouts in `wait`"),
    "perf/step_s": ("s", "wall time of the whole step"),
    "perf/rollout_s": ("s", "wall time from the start of the step's first group to the end of its last"),
}

_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends a step's figures to `metrics.jsonl`, to TensorBoard event files in `tensorboard/`, and to `wandb`.

        with MetricsWriter(run_folder, first_step=resumed_step + 1) as metrics:
            metrics.write(step, {"train/loss": 0.12, "perf/train_s": 1.4})

    Lines of `first_step` and later, left by an attempt whose checkpoint was lost, are removed, so that a step occurs
    once. Not-a-number and infinity stay visible: they are strings in the JSON, which knows no such numbers.
    """

    def __init__(self, run_folder: Path, *, first_step: int, wandb: WandbBoard | None = None) -> None:
        """`wandb` is closed with this."""
        run_folder.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(run_folder) if line["step"] < first_step]
        self._last = int(kept[-1]["step"]) if kept else first_step - 1
        path = run_folder / _FILE
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(_line(line) for line in kept))
        fresh.replace(path)
        self._file = path.open("a")
        self._board = _Board(run_folder / "tensorboard", first_step)
        self._wandb = wandb

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close(failed=kind is not None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One step's figures. Raises ContractError for a step that is not after the last one."""
        if step <= self._last:
            raise ContractError(f"metrics: step {step} after step {self._last}")
        now = time.time()
        self._file.write(_line({"step": step, "time": now, **values}))
        self._file.flush()
        self._board.write(step, now, values)
        if self._wandb is not None:
            self._wandb.write(step, values)
        self._last = step

    def close(self, *, failed: bool = False) -> None:
        """Flush all; harmless a second time. `failed` is what W&B shows of the run."""
        self._file.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.close(failed=failed)


class _Board:
    """TensorBoard's own event writer; it needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as exc:
            raise UserError("tensorboard is not installed; `pip install agent-r3[report]`") from exc
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        # Tells TensorBoard to forget what an earlier attempt wrote from this step on.
        self._writer.add_event(
            Event(step=first_step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        )

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        parts = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._writer.add_event(self._event(step=step, wall_time=now, summary=self._summary(value=parts)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def trained(line: Mapping[str, float]) -> bool:
    """Whether the line is a training step's; the one after the last step has only an evaluation."""
    return any(name.startswith("train/") for name in line)


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """The run's lines in order, each with `step`, `time` and its figures; [] when there are none yet.

    A last line cut by a kill is left out. Raises UserError for any other line that is not a JSON object.
    """
    path = run_folder / _FILE
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    steps = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline was cut
        with boundary(UserError, f"{path}, line {number}", ValueError, AttributeError):
            steps.append({name: float(value) for name, value in json.loads(line).items()})
    return steps


def _line(values: Mapping[str, float]) -> str:
    plain = {name: float(value) if math.isfinite(value) else str(float(value)) for name, value in values.items()}
    plain["step"] = int(values["step"])
    return json.dumps(plain, allow_nan=False) + "\n"


def setup_logging() -> None:
    """Logs go to stderr: coloured on a terminal, `key=value` lines elsewhere, JSON lines with AGENT_R3_LOG=json.

    Standard-library loggers of third parties come through at warning level in the same form.
    """
    json_lines = os.environ.get("AGENT_R3_LOG") == "json"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if json_lines else "%H:%M:%S", utc=json_lines),
    ]
    renderer: Any
    if json_lines:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    elif sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    else:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"], drop_missing=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("agent_r3").setLevel(logging.INFO)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )

"""Progress as it comes: rich bars on a terminal, plain lines in a log; of a run one line a step."""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agent_r3.metrics import trained

_POLL_S = 0.5


def step_line(metrics: Mapping[str, float], steps: int) -> str:
    """One step in one line; figures that were not measured are left out."""
    parts = [f"step {_done(metrics)}/{steps}" if trained(metrics) else f"after step {_done(metrics)}/{steps}"]
    for label, name, form in (
        ("pass@1 before" if trained(metrics) else "pass@1", "eval/pass@1", ".3f"),
        ("reward", "train/reward_mean", ".3f"),
        ("turns", "rollout/turns_mean", ".1f"),
        ("groups", "train/groups_kept", ".0f"),
        ("KL r3", "r3/kl_replay", ".1e"),
        ("KL native", "r3/kl_native", ".1e"),
        ("routers differ", "r3/mismatch_routers", ".2%"),
        ("rollout s", "perf/rollout_s", ".1f"),
        ("train s", "perf/update_s", ".1f"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    return " | ".join(parts)


def _done(metrics: Mapping[str, float]) -> int:
    """Steps made once the line was written."""
    return int(metrics["step"]) + trained(metrics)


class ProgressLines:
    """Bars on a terminal, and lines that stay; in a log the lines alone."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._began = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def say(self, text: str) -> None:
        """A line of its own, with the seconds since the start."""
        self._console.print(
            f"[{time.monotonic() - self._began:6.1f} s] {text}", highlight=False, markup=False, soft_wrap=True
        )


class StepProgress(ProgressLines):
    """Follows `metrics.jsonl` of a run folder: `async with StepProgress(...)`; lines of an earlier part are skipped."""

    def __init__(self, metrics: Path, steps: int, console: Console | None = None) -> None:
        self._path = metrics
        self._steps = steps
        super().__init__(console)
        self._file = self._offset = 0
        self._newest = time.time()  # of the lines that were seen
        self._task = self._bar.add_task("training", total=steps)

    async def __aenter__(self) -> "StepProgress":
        self._bar.start()
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self._read_new()
        self._bar.stop()

    async def _follow(self) -> None:
        while True:
            self._read_new()
            await asyncio.sleep(_POLL_S)

    def _read_new(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as lines:
            if (file := os.fstat(lines.fileno()).st_ino) != self._file:  # a trainer that took the run up wrote it anew
                self._file, self._offset = file, 0
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._offset += len(line)
                metrics = json.loads(line)
                if metrics["time"] > self._newest:
                    self._newest = metrics["time"]
                    self.say(step_line(metrics, self._steps))
                self._bar.update(self._task, completed=_done(metrics))

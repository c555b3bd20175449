"""The real rollout worker in a process of its own, over sandboxes of memory; tests pause and kill it.

    python -m tests.support.rollout_process FOLDER NAME

FOLDER holds config.yaml and the tokenizer. While FOLDER/hold-NAME is there, the model answers nothing. What the process
does is appended to FOLDER/events.jsonl, a line at a time.
"""

import asyncio
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from agent_r3.config import Config, load_config
from agent_r3.heartbeat import Heartbeat
from agent_r3.hfconfig import ModelInfo
from agent_r3.process import until_signalled
from agent_r3.rollout.engine import Generation
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker import RolloutWorker
from agent_r3.rollout.worker_metrics import WorkerMetrics
from agent_r3.store import TrajectoryWriter
from agent_r3.telemetry import Telemetry
from agent_r3.tools.parsers import render
from agent_r3.types import Int32Array, ToolCall, TrajectoryGroup
from tests.support.broker import MemoryGrader, MemoryProvider
from tests.support.docker import make_task
from tests.support.engine import VOCABULARY, save_tokenizer
from tests.support.scripted import ScriptedEngine
from tests.support.trajectories import SHAPE

STALE_S = 5.0  # a heartbeat comes every two seconds
_STEPS = [render(ToolCall("execute_bash", {"command": "ls"}), "r2e_xml")] * 2
_SCRIPT = [*_STEPS, render(ToolCall("finish", {"command": "submit", "result": ""}), "r2e_xml")]


class NotingWriter(TrajectoryWriter):
    """Takes over early, and tells what it claimed and published."""

    note: Callable[[str, int], None]

    async def claim_group(self, worker: str, stale_s: float = STALE_S) -> int | None:
        index = await super().claim_group(worker, stale_s)
        if index is not None:
            self.note("claimed", index)
        return index

    async def publish_group(self, worker: str, group: TrajectoryGroup, seconds: Any) -> None:
        await super().publish_group(worker, group, seconds)
        self.note("published", group.index)


class HeldEngine(ScriptedEngine):
    """Answers its second request once `hold` is gone: then the first turn is in the store."""

    index: int
    hold: Path
    note: Callable[[str, int], None]

    async def generate(self, input_ids: Int32Array, **kwargs: Any) -> Generation:
        if len(self.inputs) == 1 and self.hold.exists():
            self.note("held", self.index)
            while self.hold.exists():
                await asyncio.sleep(0.02)
        return await super().generate(input_ids, **kwargs)


class HeldFleet:
    """A new script for every episode; `folder` holds the tokenizer."""

    def __init__(self, folder: Path, name: str, note: Callable[[str, int], None]) -> None:
        self.renderer = ChatRenderer.from_folder(ModelInfo(folder, "scripted", 2, VOCABULARY, 1 << 20, SHAPE, (0, 1)))
        self._hold, self._note = folder / f"hold-{name}", note

    def at(self, group_id: str) -> HeldEngine:
        engine = HeldEngine(self.renderer, _SCRIPT, shape=SHAPE)
        engine.index, engine.hold, engine.note = int(group_id.removeprefix("g")), self._hold, self._note
        return engine


def config_of(folder: Path, url: str, run: str, *, concurrency: int = 2) -> Config:
    """Two episodes a group, and one group at a time unless there is room for more."""
    return Config.model_validate(
        {
            "run": {"name": run, "dir": str(folder / "runs")},
            "model": {"path": str(folder)},
            "tasks": {"dataset": "offline"},
            "store": {"url": url},
            "agent": {"system_prompt": "s", "max_tokens": 4096, "max_turn_tokens": 512},
            "rollout": {"samples_per_task": 2, "concurrency": concurrency},
            "sandbox": {"warm": 0},
        }
    )


async def work(folder: Path, name: str) -> None:
    config = load_config(folder / "config.yaml")
    metrics = WorkerMetrics(Telemetry("rollout", config.run.name))
    metrics.state = "running"

    def note(what: str, index: int) -> None:
        with (folder / "events.jsonl").open("a") as file:  # one write of one line: whole, also between processes
            file.write(json.dumps([name, what, index]) + "\n")

    fleet: Any = HeldFleet(folder, name, note)
    with Heartbeat(config.store, config.run.name, f"worker/{name}", metrics.payload):
        async with NotingWriter.connect(str(config.store.url), config.run.name, retry_s=math.inf) as store:
            assert isinstance(store, NotingWriter)
            store.note = note
            worker = RolloutWorker(
                *(name, config, [make_task("image")], fleet.renderer, fleet, MemoryProvider(), MemoryGrader(), store),
                metrics=metrics,
            )
            note("started", 0)
            await until_signalled(worker.run())


class Workers:
    """Processes of one run, by name."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        save_tokenizer(folder)
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        (folder / "events.jsonl").touch()

    def start(self, *names: str) -> None:
        """Start them and wait until each has begun to work."""
        for name in names:
            with self.log(name).open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(self._folder), name], stdout=log, stderr=log
                )
        for name in names:
            self.wait_for(name, "started")

    def hold(self, *names: str) -> None:
        """From now on their model answers no second request."""
        for name in names:
            (self._folder / f"hold-{name}").touch()

    def release(self, *names: str) -> None:
        for name in names:
            (self._folder / f"hold-{name}").unlink()

    def signal(self, name: str, signum: int) -> None:
        self._processes[name].send_signal(signum)

    def kill(self, name: str) -> None:
        """SIGKILL, for good."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def events(self, name: str, what: str) -> list[int]:
        """Groups of which the worker has told this."""
        lines = [json.loads(line) for line in (self._folder / "events.jsonl").read_text().splitlines()]
        return [index for who, told, index in lines if (who, told) == (name, what)]

    def wait_for(self, name: str, what: str, count: int = 1) -> None:
        """Until the worker has told this so often."""
        self.until(lambda: len(self.events(name, what)) >= count)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended: {self.log(name).read_text()[-2000:]}"
            assert time.monotonic() < deadline, (self._folder / "events.jsonl").read_text()
            time.sleep(0.02)

    def stop(self) -> Mapping[str, int]:
        """SIGTERM to all that run; their exit codes."""
        codes = {}
        for name, process in self._processes.items():
            process.send_signal(signal.SIGCONT)
            process.terminate()
            codes[name] = process.wait(30)
        self._processes.clear()
        return codes


@contextmanager
def workers_of(folder: Path, url: str, run: str) -> Iterator[Workers]:
    """Worker processes of `run`, each with one group at a time; all are gone at the end."""
    workers = Workers(folder, config_of(folder, url, run))
    try:
        yield workers
    finally:
        for name in list(workers._processes):
            workers.kill(name)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), sys.argv[2]))

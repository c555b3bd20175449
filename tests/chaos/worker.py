"""A rollout worker process of a chaos run: the real worker, sandboxes, grader and store; only the model is scripted.

    python -m tests.chaos.worker FOLDER NAME

FOLDER holds config.yaml. What this process claims and publishes is appended to FOLDER/claims.jsonl, a line at a time.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from agent_r3.config import Config, load_config
from agent_r3.envs.backend import open_backend
from agent_r3.envs.datasets import load_tasks
from agent_r3.heartbeat import Heartbeat
from agent_r3.hfconfig import ModelInfo
from agent_r3.process import until_signalled
from agent_r3.rollout.engine import Generation
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker import RolloutWorker, task_at
from agent_r3.store import TrajectoryWriter
from agent_r3.store.writer import STALE_S
from agent_r3.types import Int32Array, MoEShape, Task, TrajectoryGroup
from tests.chaos.agents import choose
from tests.support.engine import VOCABULARY
from tests.support.scripted import ScriptedEngine

SHAPE = MoEShape(num_layers=2, num_experts=8, top_k=2)


class ScriptedFleet:
    """Every attempt at an episode is an agent drawn anew."""

    def __init__(self, config: Config, tasks: list[Task], renderer: ChatRenderer) -> None:
        self._config = config
        self._tasks = tasks
        self._renderer = renderer
        self._chance = random.Random(f"{config.run.seed}/{os.getpid()}")

    def at(self, group_id: str) -> "_Engine":
        task = task_at(self._tasks, self._config.run.seed, int(group_id.removeprefix("g")))
        texts = [step.text for step in choose(task, self._chance).steps]
        return _Engine(ScriptedEngine(self._renderer, texts, shape=SHAPE))


class _Engine:
    def __init__(self, scripted: ScriptedEngine) -> None:
        self._scripted = scripted

    async def generate(self, input_ids: Int32Array, **kwargs: Any) -> Generation:
        return await self._scripted.generate(input_ids, **kwargs)

    async def health(self) -> None:
        """A script is always there."""


class NotingWriter(TrajectoryWriter):
    """Keeps a list of what was claimed and published by which process, for the account at the end."""

    notes: Path

    async def claim_group(self, worker: str, stale_s: float = STALE_S) -> int | None:
        index = await super().claim_group(worker, stale_s)
        if index is not None:
            self._note("claimed", index)
        return index

    async def publish_group(self, worker: str, group: TrajectoryGroup, seconds: Any) -> None:
        await super().publish_group(worker, group, seconds)
        self._note("published", group.index)

    def _note(self, what: str, index: int) -> None:
        with self.notes.open("a") as file:  # one write of one line: whole, also between processes
            file.write(json.dumps({"what": what, "group": index, "pid": os.getpid()}) + "\n")


async def work(folder: Path, name: str) -> None:
    config = load_config(folder / "config.yaml")
    tasks = load_tasks(config.tasks)
    model = ModelInfo(Path(config.model.path), "scripted", 2, VOCABULARY, 1 << 20, SHAPE, (0, 1))
    renderer = ChatRenderer.from_folder(model)
    with Heartbeat(config.store, config.run.name, f"worker/{name}", dict):
        await answer(config, name, tasks, renderer, folder / "claims.jsonl")


async def answer(config: Config, name: str, tasks: list[Task], renderer: ChatRenderer, notes: Path) -> None:
    async with (
        NotingWriter.connect(str(config.store.url), config.run.name) as store,
        open_backend(config.sandbox, config.grading, run=config.run.name, owner=name) as (provider, grader),
    ):
        assert isinstance(store, NotingWriter)
        store.notes = notes
        fleet: Any = ScriptedFleet(config, tasks, renderer)
        worker = RolloutWorker(name, config, tasks, renderer, fleet, provider, grader, store)
        await until_signalled(worker.run())


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), sys.argv[2]))

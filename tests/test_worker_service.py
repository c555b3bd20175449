"""The rollout worker as a service: what it counts and shows, and how it ends when it is told to."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from agent_r3.config import Config, SandboxConfig, ServiceConfig
from agent_r3.envs.backend import Backend
from agent_r3.envs.datasets import load_tasks
from agent_r3.errors import DaemonError
from agent_r3.hfconfig import read_model
from agent_r3.process import until_signalled
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker import RolloutWorker
from agent_r3.rollout.worker_metrics import WorkerMetrics
from agent_r3.store import GroupReader, TrajectoryWriter
from agent_r3.telemetry import Telemetry, serve_telemetry
from agent_r3.tools.parsers import render
from agent_r3.types import MoEShape, Task, ToolCall
from tests.support.broker import MemoryGrader, MemoryProvider, MemorySandbox, broker_at
from tests.support.docker import make_task
from tests.support.engine import LiveEngine
from tests.support.r2e_rows import r2e_row
from tests.support.scripted import ScriptedEngine
from tests.support.telemetry import fetch, free_port, key, scrape, total

SHAPE = MoEShape(num_layers=4, num_experts=16, top_k=4)
SUBMIT = render(ToolCall("finish", {"command": "submit", "result": ""}), "r2e_xml")
SAMPLES = 2


async def until(condition: str, holds: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        await asyncio.sleep(0.02)


class Fleet:
    """Every episode submits at once."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def at(self, key: str) -> ScriptedEngine:
        return ScriptedEngine(self._renderer, [SUBMIT], shape=SHAPE)


class Running:
    """A worker of one group at a time in this event loop, its grades held back."""

    def __init__(self, worker: RolloutWorker, metrics: WorkerMetrics, url: str | None, grader: MemoryGrader) -> None:
        self.worker, self.metrics, self.url, self.grader = worker, metrics, url, grader
        self.done = asyncio.create_task(worker.run())


@asynccontextmanager
async def running(embedded_url: str, model: Path, folder: Path) -> AsyncIterator[Running]:
    config = Config.model_validate(
        {
            "run": {"name": "run", "dir": folder, "archive_trajectories": False},
            "model": {"path": str(model)},
            "tasks": {"dataset": "offline"},
            "agent": {"system_prompt": "s", "max_tokens": 4096, "max_turn_tokens": 512},
            "rollout": {"samples_per_task": SAMPLES, "concurrency": SAMPLES},
        }
    )
    renderer = ChatRenderer.from_folder(read_model(model))
    telemetry, grader = Telemetry("rollout", "run"), MemoryGrader()
    metrics = WorkerMetrics(telemetry)
    grader.go.clear()
    async with TrajectoryWriter.connect(embedded_url, "run") as store:
        worker = RolloutWorker(
            "w",
            config,
            [make_task("image", "task")],
            renderer,
            Fleet(renderer),  # type: ignore[arg-type]
            MemoryProvider(),
            grader,
            store,
            metrics=metrics,
        )
        with serve_telemetry(ServiceConfig(port=0), telemetry, lambda: None) as url:
            started = Running(worker, metrics, url, grader)
            try:
                yield started
            finally:
                started.done.cancel()
                await asyncio.gather(started.done, return_exceptions=True)


async def test_a_drained_worker_publishes_what_it_holds_and_claims_no_more(
    embedded_url: str, tiny_moe: Path, tmp_path: Path
) -> None:
    with GroupReader.connect(embedded_url, "run") as reader:
        reader.set_policy(0, "weights")
        reader.set_demand(5)
        async with running(embedded_url, tiny_moe, tmp_path) as work:
            await until("both episodes are graded", lambda: work.grader.asked == SAMPLES)
            found = await asyncio.to_thread(scrape, work.url)
            assert found[key("agent_r3_episodes_running")] == SAMPLES == work.metrics.payload()["episodes_running"]
            assert work.metrics.payload()["groups_running"] == 1
            work.worker.drain()
            work.grader.go.set()
            await asyncio.wait_for(work.done, 20)
            found = await asyncio.to_thread(scrape, work.url)
        assert [delivery.group.index for delivery in reader.read(5, 0.5)] == [0]
    assert found[key("agent_r3_groups_published_total")] == 1 and found[key("agent_r3_episodes_running")] == 0
    assert found[key("agent_r3_episodes_total", ending="finish", outcome="failed")] == SAMPLES
    assert found[key("agent_r3_turn_seconds_count", stage="generate")] == SAMPLES
    tokens = {kind: found[key("agent_r3_tokens_total", kind=kind)] for kind in ("prompt", "sampled", "reprefilled")}
    assert tokens["prompt"] > 0 and tokens["sampled"] > 0 and tokens["reprefilled"] == 0
    payload = work.metrics.payload()
    assert (payload["episodes"], payload["groups_running"], payload["episodes_running"]) == (SAMPLES, 0, 0)
    assert payload["failures"] == {} and payload["policy_version"] == 0


async def test_an_idle_worker_is_drained_at_once(embedded_url: str, tiny_moe: Path, tmp_path: Path) -> None:
    with GroupReader.connect(embedded_url, "run") as reader:
        reader.set_policy(0, "weights")
        reader.set_demand(1)
        async with running(embedded_url, tiny_moe, tmp_path) as work:
            work.grader.go.set()
            await until("its only group is published", lambda: bool(reader.read(1, 0.1)))
            work.worker.drain()
            await asyncio.wait_for(work.done, 1.5)  # it waits for work in slices of 2 s


async def test_the_first_signal_drains_and_the_second_ends() -> None:
    drained, started = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    def drain() -> bool:
        drained.set()
        return True

    ends = asyncio.create_task(until_signalled(work(), drain=drain, grace_s=60))
    await started.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(drained.wait(), 5)
    assert not ends.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(ends, 5)


@pytest.mark.parametrize(("drains", "grace_s", "least_s"), [(True, 0.3, 0.3), (True, 0.0, 0.0), (False, 60.0, 0.0)])
async def test_work_that_does_not_end_is_cancelled_after_its_grace(
    drains: bool, grace_s: float, least_s: float
) -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    ends = asyncio.create_task(until_signalled(work(), drain=lambda: drains, grace_s=grace_s))
    await started.wait()
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(ends, 5)
    assert time.monotonic() - began >= least_s and cleaned.is_set()


class FailsOnce(MemoryProvider):
    """The first sandbox cannot be started."""

    failed = False

    async def acquire(self, task: Task) -> MemorySandbox:
        if not self.failed:
            self.failed = True
            raise DaemonError("the engine is away for a moment")
        return await super().acquire(task)


def write_config(folder: Path, engine: LiveEngine, embedded_url: str, broker: str, port: int) -> Path:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(r2e_row(docker_image="image", instance_id="task")))
    sections = {
        "run": {"name": "run", "dir": str(folder), "archive_trajectories": False},
        "model": {"path": str(engine.model.path)},
        "tasks": {"dataset": str(rows)},
        "sandbox": {"broker": broker},
        "agent": {"system_prompt": "s", "max_tokens": 2048, "max_turn_tokens": 16, "max_turns": 1},
        "engine": {**engine.config.model_dump(mode="json"), "urls": [engine.server.url]},
        "store": {"url": embedded_url},
        "rollout": {"samples_per_task": SAMPLES, "concurrency": SAMPLES},
        "service": {"port": port, "grace_s": 60},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.mark.engine
async def test_a_worker_process_shows_itself_and_ends_with_its_last_group_published(
    engine_fp32: LiveEngine, embedded_url: str, tmp_path: Path
) -> None:
    broker, port, grader = SandboxConfig(broker=f"unix://{tmp_path}/b.sock"), free_port(), MemoryGrader()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "stderr"
    config = write_config(tmp_path, engine_fp32, embedded_url, str(broker.broker), port)
    tasks = load_tasks(Config.model_validate(yaml.safe_load(config.read_text())).tasks)
    command = [sys.executable, "-m", "agent_r3.cli", "rollout", str(config), "--name", "w"]
    with GroupReader.connect(embedded_url, "run") as reader, log.open("w") as stderr:
        reader.set_policy(3, "weights")  # the version that the engine serves
        reader.set_demand(1)
        async with broker_at(broker, Backend(FailsOnce(), grader), tasks):
            worker = subprocess.Popen(command, stderr=stderr, env={**os.environ, "AGENT_R3_LOG": "json"})
            try:
                await until("its first group", lambda: bool(reader.read(1, 0.1)))
                assert await asyncio.to_thread(fetch, f"{url}/healthz") == (200, "ok\n")
                found = await asyncio.to_thread(scrape, url)
                grader.go.clear()
                reader.set_demand(2)
                await until("the next group is graded", lambda: grader.asked == 2 * SAMPLES)
                worker.terminate()
                await until("it says so", lambda: reader.roles()["worker/w"].payload["state"] == "stopping")
                reader.set_demand(5)
                grader.go.set()
                assert await asyncio.to_thread(worker.wait, 30) == 0, log.read_text()
            finally:
                worker.kill()
        assert [delivery.group.index for delivery in reader.read(5, 0.5)] == [1]
        payload = reader.roles()["worker/w"].payload
    assert payload["state"] == "stopped" and payload["failures"] == {"docker": 1} and payload["episodes"] == 2 * SAMPLES
    assert found[key("agent_r3_up", role="rollout", run="run")] == 1 and found[key("agent_r3_policy_version")] == 3
    assert found[key("agent_r3_infra_failures_total", kind="docker")] == 1
    assert total(found, "agent_r3_infra_failures_total") == 1 and total(found, "agent_r3_episodes_total") == SAMPLES
    assert 0 < found[key("agent_r3_tokens_total", kind="sampled")] <= 16 * SAMPLES
    lines = {line["event"]: line for line in map(json.loads, log.read_text().splitlines())}
    assert {"run": "run", "role": "rollout", "worker": "w"}.items() <= lines["worker started"].items()
    named = {"run": "run", "worker": "w", "group": "g000000", "task": "task", "policy_version": 3, "kind": "docker"}
    assert named.items() <= lines["episode failed"].items()
    assert lines["episode failed"]["episode"] in ("g000000-00", "g000000-01")


def test_a_port_in_use_ends_a_role_with_one_line(tmp_path: Path) -> None:
    with serve_telemetry(ServiceConfig(port=0), Telemetry("rollout", "run"), lambda: None) as url:
        port = str(url).rpartition(":")[2]
        rows, config = tmp_path / "rows.jsonl", tmp_path / "broker.yaml"
        rows.write_text(json.dumps(r2e_row(docker_image="image", instance_id="task")))
        config.write_text(yaml.safe_dump({"model": {"path": "tiny"}, "tasks": {"dataset": str(rows)}}))
        command = [sys.executable, "-m", "agent_r3.cli", "broker", str(config), f"service.port={port}"]
        ended = subprocess.run(
            [*command, "--listen", f"unix://{tmp_path}/b.sock"], capture_output=True, text=True, timeout=60
        )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"agent-r3: service.port: cannot listen on 127.0.0.1:{port}: Address already in use")

"""Traces: the tree of an episode and of a training step, over the wire; nothing when off; no harm when it fails."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from structlog.testing import capture_logs

from agent_r3.archive import list_episodes, read_info
from agent_r3.config import TrackConfig, dump_config
from agent_r3.envs.backend import Backend
from agent_r3.hfconfig import read_model
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.store import EmbeddedServer
from agent_r3.tools.parsers import render
from agent_r3.tracing import annotate, span, tracing, using
from agent_r3.tracing_otlp import exporting
from agent_r3.types import MoEShape, Task, ToolCall
from tests.support.broker import MemoryGrader, MemoryProvider
from tests.support.docker import make_task
from tests.support.engine import save_tiny_moe
from tests.support.otlp import Collector, collecting
from tests.support.rollout import ScriptedRollout
from tests.support.trainer import GROUPS, make_run, rewards
from tests.support.training import Training
from tests.test_worker import RUN, ScriptedFleet, config_of, publish

TASK = make_task("image", name="the-task")
BASH = render(ToolCall("execute_bash", {"cmd": "ls"}), "r2e_xml")
FINISH = render(ToolCall("finish", {"command": "submit"}), "r2e_xml")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.from_folder(read_model(save_tiny_moe(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as serving:
        yield serving


def run_group(renderer: ChatRenderer, folder: Path, scripts: list[list[str | None]], task: Task = TASK) -> None:
    """Have a real worker make one group of two episodes, in sandboxes of memory."""
    backend = Backend(MemoryProvider(), MemoryGrader())
    with EmbeddedServer(folder / "store") as server:
        publish(server.url, config_of(folder), renderer, task, ScriptedFleet(renderer, scripts), backend)


def tree(spans: Sequence[ReadableSpan], root: ReadableSpan) -> list[Any]:
    """Name, then the trees of what is under it, by when each began."""
    below = [one for one in spans if one.parent is not None and one.parent.span_id == root.context.span_id]
    return [root.name, *(tree(spans, one) for one in sorted(below, key=lambda one: one.start_time or 0))]


def values(one: ReadableSpan) -> dict[str, Any]:
    return dict(one.attributes or {})


def test_an_episode_is_a_trace_of_turns_with_generate_tool_and_append_and_of_its_grade(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    memory = InMemorySpanExporter()
    resource = {"role": "rollout", "run": RUN, "worker": "w"}
    with exporting(memory, resource) as tracer, using(tracer):
        run_group(renderer, tmp_path, [[BASH, FINISH], [FINISH]])
    spans = memory.get_finished_spans()
    roots = sorted((one for one in spans if one.parent is None), key=lambda one: str(values(one)["episode"]))
    turn = ["turn", ["generate"], ["tool"], ["append"]]
    assert [tree(spans, root) for root in roots] == [
        ["episode", ["sandbox_wait"], turn, turn, ["diff"], ["grade"]],
        ["episode", ["sandbox_wait"], ["prefix_wait"], turn, ["diff"], ["grade"]],
    ]
    assert roots[0].context.trace_id != roots[1].context.trace_id
    for number, root in enumerate(roots):
        attributes = values(root)
        assert attributes["episode"] == f"g000000-{number:02d}" and attributes["group"] == "g000000"
        assert (attributes["task"], attributes["policy_version"], attributes["held_out"]) == ("the-task", 0, False)
        assert (attributes["ending"], attributes["reward"]) == ("finish", 0.5)
        own = [one for one in spans if one.context.trace_id == root.context.trace_id]
        generated = [values(one) for one in own if one.name == "generate"]
        assert attributes["turns"] == len(generated) and all(one["sampled_tokens"] > 0 for one in generated)
        assert attributes["prompt_tokens"] == sum(one["prompt_tokens"] for one in generated)
        assert attributes["cached_tokens"] == sum(one["cached_tokens"] for one in generated)
        assert {key: root.resource.attributes[key] for key in resource} == resource
        assert root.resource.attributes["service.name"] == "agent-r3-rollout"
    assert [values(one)["tool"] for one in spans if one.name == "tool"].count("execute_bash") == 1
    for one in spans:
        if one.name == "grade":
            assert (values(one)["outcome"], values(one)["reward"]) == ("failed", 0.5)


def test_an_attempt_that_fails_is_a_trace_of_its_own_that_says_so(renderer: ChatRenderer, tmp_path: Path) -> None:
    memory = InMemorySpanExporter()
    with exporting(memory, {"role": "rollout"}) as tracer, using(tracer):
        run_group(renderer, tmp_path, [[None, FINISH], [FINISH]])
    roots = [one for one in memory.get_finished_spans() if one.parent is None]
    failed = [one for one in roots if one.status.status_code is StatusCode.ERROR]
    assert len(roots) == 3 and len(failed) == 1
    assert "the engine is gone" in str(failed[0].status.description)
    assert f"{values(failed[0])['episode']}-retry1" in [values(root)["episode"] for root in roots]


def test_spans_arrive_at_a_collector_with_their_parents_values_and_process(collector: Collector) -> None:
    async def episode(name: str) -> None:
        with span("episode", episode=name, policy_version=3):
            with span("turn", turn=0):
                await asyncio.sleep(0)
                annotate(tokens=7, share=0.5, cut=True)
            annotate(ending="finish")

    async def both() -> None:
        await asyncio.gather(episode("a"), episode("b"))

    with tracing(TrackConfig(otlp_endpoint=f"{collector.url}/"), "rollout", run="r", worker="w"):
        asyncio.run(both())
    assert collector.paths == {"/v1/traces"}
    assert [one.resource["run"] for one in collector.spans] == ["r"] * 4
    roots = collector.named("episode")
    assert {root.attributes["episode"] for root in roots} == {"a", "b"} and roots[0].trace != roots[1].trace
    for root in roots:
        assert collector.children(root) == ["turn"] and root.parent == b"" and not root.failed
        assert root.attributes["policy_version"] == 3 and root.attributes["ending"] == "finish"
        assert root.resource["service.name"] == "agent-r3-rollout" and root.resource["worker"] == "w"
    for turn in collector.named("turn"):
        assert turn.attributes == {"turn": 0, "tokens": 7, "share": 0.5, "cut": True}


@pytest.mark.parametrize("fault", ["nobody", "refuses", "hangs"])
def test_a_collector_that_fails_costs_its_spans_and_nothing_else(collector: Collector, fault: str) -> None:
    url = "http://127.0.0.1:9" if fault == "nobody" else collector.url
    if fault == "refuses":
        collector.status = 400
    if fault == "hangs":
        collector.answer.clear()
    with capture_logs() as logs:
        began = time.monotonic()
        with tracing(TrackConfig(otlp_endpoint=url), "rollout"):
            for _ in range(2_000):  # several batches
                with span("episode"), span("turn"):
                    pass
            worked_s = time.monotonic() - began
        assert time.monotonic() - began < worked_s + 7
    assert worked_s < 5
    told = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert told == ["traces are lost: the collector of track.otlp_endpoint does not take them"][: len(told)]
    assert told or fault == "hangs"
    assert collector.spans == []


def test_an_exception_passes_through_a_span_unchanged(collector: Collector) -> None:
    error = KeyError("mine")
    track = TrackConfig(otlp_endpoint=collector.url)
    with tracing(track, "rollout"), pytest.raises(KeyError) as raised, span("episode"):
        raise error
    assert raised.value is error
    assert [one.failed for one in collector.spans] == [True]


def test_without_an_endpoint_a_span_costs_little_and_opentelemetry_is_not_imported() -> None:
    code = (
        "import sys, timeit\n"
        "from agent_r3.config import TrackConfig\n"
        "from agent_r3.tracing import annotate, span, tracing\n"
        "def one():\n"
        "    with span('turn', turn=1, task='x'): annotate(tokens=3)\n"
        "with tracing(TrackConfig(), 'rollout', run='r'):\n"
        "    print(min(timeit.repeat(one, number=10_000, repeat=5)) / 10_000)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, imported = done.stdout.splitlines()
    assert float(seconds) < 1e-5  # about 1e-6; a turn of an episode makes four of them
    assert imported == "[]"


@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_a_training_step_is_a_trace_with_its_stages(
    tiny_moe: Path, tiny_shape: MoEShape, trainer_store: str, tmp_path: Path, collector: Collector
) -> None:
    run = make_run("traced", tiny_moe, trainer_store, tmp_path)
    config = run.loaded()
    track, train = TrackConfig(otlp_endpoint=collector.url), config.train.model_copy(update={"steps": 2})
    run.config.write_text(dump_config(config.model_copy(update={"track": track, "train": train})))
    with ScriptedRollout(trainer_store, run.name, tiny_shape, rewards):
        run.finish(run.start())
    steps = collector.named("train_step")
    assert [step.attributes["step"] for step in steps] == [0, 1]
    for step, line in zip(steps, run.metrics(), strict=True):
        assert collector.children(step) == ["wait", "load", "logprobs", "diagnostics", "update", "push"]
        assert step.attributes["policy_version"] == line["train/policy_version"]
        assert step.attributes["groups"] == GROUPS
        assert step.seconds == pytest.approx(line["perf/step_s"], abs=0.05)
        assert (step.resource["run"], step.resource["role"], step.resource["rank"]) == ("traced", "trainer", 0)


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_whole_run_leaves_a_trace_of_every_episode_and_step(
    finished_training: Training, finished_traces: Collector
) -> None:
    assert [step.attributes["step"] for step in finished_traces.named("train_step")] == [0, 1]
    episodes = finished_traces.named("episode")
    assert {episode.attributes["held_out"] for episode in episodes} == {True, False}
    assert {episode.resource["worker"] for episode in episodes} == {"worker-0"}
    traced = {episode.attributes["episode"]: episode for episode in episodes if not episode.attributes["held_out"]}
    archived = [read_info(path) for path in list_episodes(finished_training.folder)]
    assert archived
    for info in archived:
        episode = traced[info.id]
        assert (episode.attributes["turns"], episode.attributes["reward"]) == (len(info.turns), info.reward)
        below = finished_traces.children(episode)
        assert below.count("turn") == len(info.turns) and below[-2:] == ["diff", "grade"]
    known = {(one.trace, one.id) for one in finished_traces.spans}
    assert all(one.parent == b"" or (one.trace, one.parent) in known for one in finished_traces.spans)

"""The agent loop: what is sent, what is recorded, how it ends. Scripted engine; the real one is in test_engine*."""

import asyncio
import time

import numpy as np
import pytest

from agent_r3.config import AgentConfig
from agent_r3.errors import DataError, EngineError
from agent_r3.hfconfig import read_model
from agent_r3.rollout.conversation import Agent, fill
from agent_r3.rollout.episode import Episode, run_episode
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.tools.parsers import render
from agent_r3.trajectory import TrajectoryEnd, TurnRecord, engine_counters, splice
from agent_r3.types import Ending, MoEShape, Task, ToolCall, Turn
from tests.support.engine import save_tiny_moe
from tests.support.scripted import DictSandbox, ScriptedEngine

SHAPE = MoEShape(num_layers=4, num_experts=16, top_k=4)
TASK = Task("t1", "offline", "repo", "image", "Fix {it}.", {}, "true", "")
BASH = render(ToolCall("execute_bash", {"cmd": "ls"}), "r2e_xml")
FINISH = render(ToolCall("finish", {"command": "submit"}), "r2e_xml")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.from_folder(read_model(save_tiny_moe(tmp_path_factory.mktemp("model"))))


def run(engine: ScriptedEngine, renderer: ChatRenderer, **limits: object) -> tuple[Episode[Turn], list[Turn]]:
    config = AgentConfig.model_validate({"system_prompt": "s", "max_tokens": 4096, "max_turn_tokens": 256, **limits})
    turns: list[Turn] = []

    async def sink(turn: Turn) -> None:
        turns.append(turn)

    episode = asyncio.run(run_episode(Agent(engine, renderer, config), TASK, DictSandbox(), sink))
    return episode, turns


def test_what_is_sent_is_all_ids_so_far_plus_newly_rendered_ones(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, [BASH, BASH, FINISH], shape=SHAPE)
    episode, turns = run(engine, renderer)
    assert episode.ending is Ending.FINISH
    assert turns == list(episode.turns)
    whole = np.concatenate([part for turn in turns for part in (turn.prompt_ids, turn.sampled_ids)])
    assert whole.tolist() == [*engine.inputs[-1].tolist(), *engine.outputs[-1].tolist()]
    for turn, sent in zip(turns, engine.inputs, strict=True):
        assert sent.tolist() == whole[: turn.start + len(turn.prompt_ids)].tolist()


def test_turns_splice_to_one_row_less_than_tokens_and_the_loss_is_on_sampled_tokens(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, [BASH, FINISH], shape=SHAPE)
    episode, turns = run(engine, renderer)
    end = TrajectoryEnd("x", "g", "t1", 1.0, episode.ending, 0, 0, 0)
    trajectory = splice([TurnRecord.of(turn) for turn in turns], end)
    assert len(trajectory.routing.experts) == len(trajectory.tokens) - 1
    sampled = np.concatenate(engine.outputs)
    assert trajectory.tokens[trajectory.loss_mask].tolist() == sampled.tolist()
    assert not trajectory.logprobs[~trajectory.loss_mask].any()


@pytest.mark.parametrize(
    ("script", "limits", "ending", "turns"),
    [
        ([FINISH], {}, Ending.FINISH, 1),
        ([BASH, BASH, BASH], {"max_turns": 2}, Ending.MAX_TURNS, 2),
        (["no call", BASH, "no call"], {"max_bad_calls": 2}, Ending.BAD_CALLS, 3),
        (["x" * 400], {"max_turn_tokens": 16}, Ending.MAX_TOKENS, 1),
        ([BASH, BASH, BASH, BASH], {"max_tokens": 200}, Ending.MAX_TOKENS, None),
    ],
)
def test_each_ending_is_a_value(
    renderer: ChatRenderer, script: list[str | None], limits: dict[str, object], ending: Ending, turns: int | None
) -> None:
    episode, _ = run(ScriptedEngine(renderer, script, shape=SHAPE), renderer, **limits)
    assert episode.ending is ending
    assert turns is None or len(episode.turns) == turns
    assert sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in episode.turns) <= 4096
    assert episode.patch == b"a change"


def test_a_turn_cut_by_the_token_limit_is_not_acted_on(renderer: ChatRenderer) -> None:
    whole = len(renderer.encode_turn(BASH))
    episode, turns = run(ScriptedEngine(renderer, [BASH], shape=SHAPE), renderer, max_turn_tokens=whole - 1)
    assert episode.ending is Ending.MAX_TOKENS
    assert turns[0].calls == () and turns[0].observations == ()


def test_time_runs_out_during_a_turn_and_that_turn_is_left_out(renderer: ChatRenderer) -> None:
    class Slow(ScriptedEngine):
        async def generate(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            if self.inputs:
                await asyncio.sleep(30)
            return await super().generate(*args, **kwargs)  # type: ignore[arg-type]

    began = time.monotonic()
    episode, turns = run(Slow(renderer, [BASH, FINISH], shape=SHAPE), renderer, timeout_s=1.0)  # type: ignore[arg-type]
    assert (episode.ending, len(turns)) == (Ending.TIMEOUT, 1)
    assert time.monotonic() - began < 10


def test_the_time_in_which_the_store_is_away_is_not_the_agents(renderer: ChatRenderer) -> None:
    async def sink(turn: Turn) -> None:
        if turn.index == 0:
            await asyncio.sleep(2.2)

    config = AgentConfig.model_validate({"system_prompt": "s", "timeout_s": 2.0})
    agent = Agent(ScriptedEngine(renderer, [BASH, FINISH], shape=SHAPE), renderer, config)
    episode = asyncio.run(run_episode(agent, TASK, DictSandbox(), sink))
    assert (episode.ending, len(episode.turns)) == (Ending.FINISH, 2)


def test_no_first_turn_in_time_is_the_engines_fault_and_not_the_agents(renderer: ChatRenderer) -> None:
    class Hung(ScriptedEngine):
        async def generate(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            await asyncio.sleep(30)
            return None

    with pytest.raises(EngineError, match="no first turn"):
        run(Hung(renderer, [], shape=SHAPE), renderer, timeout_s=0.2)  # type: ignore[arg-type]


def test_a_dead_engine_is_raised_and_no_observation(renderer: ChatRenderer) -> None:
    with pytest.raises(EngineError, match="gone"):
        run(ScriptedEngine(renderer, [BASH, None], shape=SHAPE), renderer)


def test_earlier_tokens_that_are_computed_again_are_counted(renderer: ChatRenderer) -> None:
    perfect, _ = run(ScriptedEngine(renderer, [BASH, BASH, FINISH], shape=SHAPE), renderer)
    evicted, turns = run(ScriptedEngine(renderer, [BASH, BASH, FINISH], shape=SHAPE, cached=lambda _: 0), renderer)
    assert engine_counters(perfect.turns)["reprefilled_tokens"] == 0
    counters = engine_counters(evicted.turns)
    assert counters["reprefilled_tokens"] == sum(turn.start - 1 for turn in turns[1:])
    assert counters["prompt_tokens"] == sum(turn.start + len(turn.prompt_ids) for turn in turns)


def test_a_prompt_without_room_for_an_answer_is_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(DataError, match=r"t1: its prompt has \d+ tokens, agent.max_tokens is 5"):
        run(ScriptedEngine(renderer, [FINISH], shape=SHAPE), renderer, max_tokens=5)


def test_prompts_fill_known_names_once_and_leave_other_braces() -> None:
    values = {"repo": "{workdir}", "workdir": "/testbed"}
    assert fill("{repo} in {workdir}: {x} {", values) == "{workdir} in /testbed: {x} {"

"""One episode: the agent loop, token in, token out.

The ids sent to the engine are exactly the ids already seen plus newly rendered ones. Nothing sampled is decoded and
encoded again, and no earlier message is rendered again. docs/trajectory.md tells the life of a trajectory.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agent_r3.config import AgentConfig
from agent_r3.envs.sandbox import Sandbox
from agent_r3.errors import DataError, EngineError
from agent_r3.rollout.engine import Engine, Generation
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.routing import rows_from
from agent_r3.tools.parsers import CallProblem
from agent_r3.tools.toolbox import Toolbox
from agent_r3.trajectory import engine_counters
from agent_r3.types import Ending, Int32Array, Observation, Task, ToolCall, Turn

TurnSink = Callable[[Turn], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Episode:
    """What the loop leaves behind: the turns it appended, how it ended, and the agent's change."""

    turns: tuple[Turn, ...]
    ending: Ending
    patch: bytes

    @property
    def counters(self) -> dict[str, int]:
        """prompt_tokens, cached_tokens and reprefilled_tokens, summed over the turns."""
        return engine_counters(self.turns)


@dataclass(frozen=True, slots=True)
class Agent:
    """What an episode needs and outlives it."""

    engine: Engine
    renderer: ChatRenderer
    config: AgentConfig

    def first_prompt(self, task: Task, toolbox: Toolbox) -> Int32Array:
        """System and user message, ending where the assistant begins. DataError when it leaves no room to answer."""
        names = {"workdir": task.workdir, "repo": task.repo, "tools": toolbox.documentation}
        prompt = self.renderer.initial(
            fill(self.config.system_prompt, names),
            fill(self.config.instance_prompt, names | {"problem_statement": task.problem_statement}),
        )
        if len(prompt) >= self.config.max_tokens:
            raise DataError(
                f"task {task.id}: its prompt has {len(prompt)} tokens, agent.max_tokens is {self.config.max_tokens}"
            )
        return prompt


async def run_episode(
    agent: Agent, task: Task, sandbox: Sandbox, sink: TurnSink, *, after_first: Callable[[], None] = lambda: None
) -> Episode:
    """Run the agent on `task` in `sandbox`; each turn goes to `sink` when its observations are there.

    `after_first` is called once the first request is answered: then the task's prompt is in the prefix cache.
    Infrastructure errors pass through.
    """
    config, toolbox = agent.config, Toolbox(agent.config)
    deadline = time.monotonic() + config.timeout_s
    tokens = np.zeros(0, dtype=np.int32)
    pending = agent.first_prompt(task, toolbox)
    turns: list[Turn] = []
    bad_calls = 0
    ending: Ending | None = None
    while ending is None:
        sequence = np.concatenate([tokens, pending])
        room = min(config.max_turn_tokens, config.max_tokens - len(sequence))
        if room < 1:
            ending = Ending.MAX_TOKENS
            break
        began = time.monotonic()
        generation = await _before(deadline, agent.engine, sequence, room, rows_from(len(tokens)))
        generated = time.monotonic()
        if generation is None:
            if not turns:
                raise EngineError(f"no first turn within agent.timeout_s={config.timeout_s:g}")
            ending = Ending.TIMEOUT
            break
        after_first()
        text = agent.renderer.decode(generation.output_ids)
        # A turn cut by the token limit is never acted on: its call may be half of what the agent meant.
        calls = toolbox.parse(text) if generation.finished else []
        observations = await toolbox.run(calls, sandbox) if generation.finished else ()
        seconds = {"generate": generated - began, "tools": time.monotonic() - generated}
        turn = _turn(len(turns), len(tokens), pending, generation, text, calls, observations, seconds)
        await sink(turn)
        turns.append(turn)
        tokens = np.concatenate([sequence, generation.output_ids])
        bad_calls += bool(observations) and observations[0].is_error
        ending = _ending(config, turn, len(turns), bad_calls, deadline)
        if ending is None:
            pending = agent.renderer.observation([observation.text for observation in observations])
    return Episode(tuple(turns), ending, await sandbox.diff())


async def _before(
    deadline: float, engine: Engine, sequence: Int32Array, max_new_tokens: int, start: int
) -> Generation | None:
    """Generate, or None when the episode's time is up before the answer is there."""
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await engine.generate(sequence, max_new_tokens=max_new_tokens, rows_from=start)
    except TimeoutError:
        return None


def _turn(
    index: int,
    start: int,
    prompt_ids: Int32Array,
    generation: Generation,
    text: str,
    calls: Sequence[ToolCall] | CallProblem,
    observations: tuple[Observation, ...],
    seconds: dict[str, float],
) -> Turn:
    return Turn(
        index=index,
        start=start,
        prompt_ids=prompt_ids,
        sampled_ids=generation.output_ids,
        logprobs=generation.logprobs,
        routing=generation.routing,
        policy_version=generation.policy_version,
        cached_tokens=generation.cached_tokens,
        text=text,
        calls=() if isinstance(calls, CallProblem) else tuple(calls),
        observations=observations,
        seconds=seconds,
    )


def _ending(config: AgentConfig, turn: Turn, turns: int, bad_calls: int, deadline: float) -> Ending | None:
    if not turn.observations:  # cut by the token limit
        return Ending.MAX_TOKENS
    if any(observation.finished for observation in turn.observations):
        return Ending.FINISH
    if config.max_bad_calls is not None and bad_calls >= config.max_bad_calls:
        return Ending.BAD_CALLS
    if turns >= config.max_turns:
        return Ending.MAX_TURNS
    if time.monotonic() >= deadline:
        return Ending.TIMEOUT
    return None


def fill(template: str, values: dict[str, str]) -> str:
    """Replace each `{name}` of `values` in one pass; other braces stay, and so do braces inside the values."""
    head, *parts = template.split("{")
    out = [head]
    for part in parts:
        name, closed, rest = part.partition("}")
        out.append(values[name] + rest if closed and name in values else "{" + part)
    return "".join(out)

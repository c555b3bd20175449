"""One episode: the agent loop, the same for training and evaluation and for every kind of model."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent_r3.config import AgentConfig
from agent_r3.envs.sandbox import Sandbox
from agent_r3.errors import EngineError
from agent_r3.rollout.conversation import Calls, Conversation, Reply, Speaker
from agent_r3.tools.parsers import CallProblem
from agent_r3.tools.toolbox import REGISTRY, Toolbox
from agent_r3.tracing import annotate, span
from agent_r3.types import Ending, Observation, Task

T = TypeVar("T")
TurnSink = Callable[[T], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Episode(Generic[T]):
    """What the loop leaves behind: the turns it appended, how it ended, and the agent's change."""

    turns: tuple[T, ...]
    ending: Ending
    patch: bytes


async def run_episode(
    speaker: Speaker[T],
    task: Task,
    sandbox: Sandbox,
    sink: TurnSink[T],
    *,
    after_first: Callable[[], None] = lambda: None,
) -> Episode[T]:
    """Run the agent on `task` in `sandbox`; each turn goes to `sink` when its observations are there.

    `after_first` is called once the first request is answered: then the task's prompt is in the prefix cache.
    Infrastructure errors pass through.
    """
    config, toolbox = speaker.config, Toolbox(speaker.config)
    deadline = time.monotonic() + config.timeout_s
    conversation = speaker.begin(task, toolbox)
    turns: list[T] = []
    bad_calls = 0
    ending: Ending | None = None
    while ending is None:
        with span("turn", turn=len(turns)):
            began = time.monotonic()
            try:
                reply = await _before(deadline, conversation)
            except TimeoutError:
                if not turns:
                    raise EngineError(f"no first turn within agent.timeout_s={config.timeout_s:g}") from None
                ending = Ending.TIMEOUT
                break
            if reply is None:
                ending = Ending.MAX_TOKENS
                break
            generated = time.monotonic()
            after_first()
            # A turn cut by the token limit is never acted on: its call may be half of what the agent meant.
            calls = [] if not reply.finished else toolbox.parse(reply.text) if reply.calls is None else reply.calls
            observations = await _run(toolbox, calls, sandbox) if reply.finished else ()
            seconds = {"generate": generated - began, "tools": time.monotonic() - generated}
            turn = conversation.turn(() if isinstance(calls, CallProblem) else calls, observations, seconds)
            appending = time.monotonic()
            with span("append"):
                await sink(turn)
            deadline += time.monotonic() - appending  # a store that is away does not cost the agent its time
            turns.append(turn)
            bad_calls += bool(observations) and observations[0].is_error
            ending = _ending(config, observations, len(turns), bad_calls, deadline)
            if ending is None:
                conversation.observe(observations)
    with span("diff"):
        patch = await sandbox.diff()
    return Episode(tuple(turns), ending, patch)


async def _before(deadline: float, conversation: Conversation[T]) -> Reply | None:
    """The next reply. Raises TimeoutError when the episode's time is up before it is there."""
    with span("generate"):
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await conversation.reply()


async def _run(toolbox: Toolbox, calls: Calls, sandbox: Sandbox) -> tuple[Observation, ...]:
    with span("tool", tool=_tool(calls)):
        observations = await toolbox.run(calls, sandbox)
        annotate(error=observations[0].is_error)
        return observations


def _tool(calls: Calls) -> str:
    """The tool that is run, for the trace; what a model writes there may be anything."""
    name = calls[0].name if not isinstance(calls, CallProblem) and calls else ""
    return name if name in REGISTRY else "none"


def _ending(
    config: AgentConfig, observations: tuple[Observation, ...], turns: int, bad_calls: int, deadline: float
) -> Ending | None:
    if not observations:  # cut by the token limit
        return Ending.MAX_TOKENS
    if any(observation.finished for observation in observations):
        return Ending.FINISH
    if config.max_bad_calls is not None and bad_calls >= config.max_bad_calls:
        return Ending.BAD_CALLS
    if turns >= config.max_turns:
        return Ending.MAX_TURNS
    if time.monotonic() >= deadline:
        return Ending.TIMEOUT
    return None

"""One episode's exchange with the model, token in and token out; the agent loop sees it as a `Conversation`.

The ids sent to the engine are exactly the ids already seen plus newly rendered ones. Nothing sampled is decoded and
encoded again, and no earlier message is rendered again. docs/trajectory.md tells the life of a trajectory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from agent_r3.config import AgentConfig
from agent_r3.errors import ContractError, DataError
from agent_r3.rollout.engine import Engine, Generation
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.routing import rows_from
from agent_r3.tools.parsers import CallProblem
from agent_r3.tools.toolbox import Toolbox
from agent_r3.tracing import annotate
from agent_r3.types import Int32Array, Observation, Task, ToolCall, Turn

Calls = Sequence[ToolCall] | CallProblem


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote in one turn."""

    text: str
    finished: bool  # False when a token limit cut it: then it is never acted on
    calls: Calls | None = None  # that came beside the text; None where calls stand in the text


TurnT = TypeVar("TurnT", covariant=True)


class Conversation(Protocol[TurnT]):
    """The turns of one episode, in order: `reply`, then `turn`, then `observe`, and again."""

    async def reply(self) -> Reply | None:
        """The model's next turn; None where `agent.max_tokens` leaves no room for one. Raises EngineError."""
        ...

    def turn(
        self, calls: Sequence[ToolCall], observations: tuple[Observation, ...], seconds: Mapping[str, float]
    ) -> TurnT:
        """The record of the turn that `reply` gave, with what came of it."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """What the model sees next."""
        ...


class Speaker(Protocol[TurnT]):
    """A model that agents can be run with."""

    @property
    def config(self) -> AgentConfig: ...

    def begin(self, task: Task, toolbox: Toolbox) -> Conversation[TurnT]:
        """A new conversation on `task`. DataError when its prompt leaves no room to answer."""
        ...


@dataclass(frozen=True, slots=True)
class Agent:
    """The policy behind an engine: what an episode needs and outlives it."""

    engine: Engine
    renderer: ChatRenderer
    config: AgentConfig
    seed: int | None = None  # of sampling, for engines that take one

    def begin(self, task: Task, toolbox: Toolbox) -> "TokenConversation":
        return TokenConversation(self, first_prompt(self.renderer, self.config, task, toolbox.documentation))


class TokenConversation:
    """A conversation of token ids; its turns carry log-probs and routing rows."""

    def __init__(self, agent: Agent, prompt: Int32Array) -> None:
        self._agent = agent
        self._tokens = np.zeros(0, dtype=np.int32)  # of all finished turns
        self._pending = prompt  # rendered, not yet sent
        self._generation: Generation | None = None
        self._text = ""
        self._index = 0

    async def reply(self) -> Reply | None:
        config = self._agent.config
        sequence = np.concatenate([self._tokens, self._pending])
        room = min(config.max_turn_tokens, config.max_tokens - len(sequence))
        if room < 1:
            return None
        seed = None if self._agent.seed is None else self._agent.seed + self._index
        self._generation = await self._agent.engine.generate(
            sequence, max_new_tokens=room, rows_from=rows_from(len(self._tokens)), seed=seed
        )
        annotate(
            policy_version=self._generation.policy_version,
            prompt_tokens=len(sequence),
            cached_tokens=self._generation.cached_tokens,
            sampled_tokens=len(self._generation.output_ids),
        )
        self._text = self._agent.renderer.decode(self._generation.output_ids)
        return Reply(self._text, self._generation.finished)

    def turn(
        self, calls: Sequence[ToolCall], observations: tuple[Observation, ...], seconds: Mapping[str, float]
    ) -> Turn:
        generation = self._generation
        if generation is None:
            raise ContractError("a turn was closed that no reply had begun")
        turn = Turn(
            index=self._index,
            start=len(self._tokens),
            prompt_ids=self._pending,
            sampled_ids=generation.output_ids,
            logprobs=generation.logprobs,
            routing=generation.routing,
            policy_version=generation.policy_version,
            cached_tokens=generation.cached_tokens,
            text=self._text,
            calls=tuple(calls),
            observations=observations,
            seconds=seconds,
        )
        self._tokens = np.concatenate([self._tokens, self._pending, generation.output_ids])
        self._generation = None
        self._index += 1
        return turn

    def observe(self, observations: Sequence[Observation]) -> None:
        self._pending = self._agent.renderer.observation([observation.text for observation in observations])


def first_prompt(renderer: ChatRenderer, config: AgentConfig, task: Task, tools: str) -> Int32Array:
    """The opening, up to where the assistant begins. DataError when it leaves no room to answer."""
    prompt = renderer.initial(*opening(config, task, tools))
    if len(prompt) >= config.max_tokens:
        raise DataError(f"task {task.id}: its prompt has {len(prompt)} tokens, agent.max_tokens is {config.max_tokens}")
    return prompt


def opening(config: AgentConfig, task: Task, tools: str) -> tuple[str, str]:
    """System and user message of an episode. `tools`: their documentation, for `{tools}` in the system prompt."""
    names = {"workdir": task.workdir, "repo": task.repo, "tools": tools}
    user = fill(config.instance_prompt, names | {"problem_statement": task.problem_statement})
    return fill(config.system_prompt, names), user


def fill(template: str, values: dict[str, str]) -> str:
    """Replace each `{name}` of `values` in one pass; other braces stay, and so do braces inside the values."""
    head, *parts = template.split("{")
    out = [head]
    for part in parts:
        name, closed, rest = part.partition("}")
        out.append(values[name] + rest if closed and name in values else "{" + part)
    return "".join(out)

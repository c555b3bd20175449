"""Episodes over chat completions: the same loop, tools, prompts and limits as in training, for models of others.

Messages take the place of token ids. How they differ from the token path, and what is done about it:

- Without native calls an observation goes back as a user message of `<tool_response>` blocks. Every server takes it,
  and Qwen's chat template renders it to what it makes of tool messages, so that our own policies see the tokens they
  were trained on, as far as text says: the server encodes what the model wrote anew, and reads control tokens in an
  observation as such.
- With native calls each call of a turn gets its `tool` message, also those that are not run. A call that the model
  writes as text is no call then.
- A model's reasoning that the server reports apart is kept in the record as `<think>`, but not sent back, as most
  servers want it; content goes back as it came.
- How many tokens a new message has is known once it is answered. So the last turn may be asked for more tokens than
  there is room for; if it takes them, it is treated as cut.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_r3.archive import TurnText
from agent_r3.config import AgentConfig
from agent_r3.errors import ContractError, DataError
from agent_r3.eval.completion import Completion, FunctionCall, NoRoomError
from agent_r3.rollout.conversation import Calls, Reply, opening
from agent_r3.rollout.tokens import RESPONSE, RESPONSE_END
from agent_r3.tools.parsers import CallProblem
from agent_r3.tools.toolbox import Toolbox
from agent_r3.types import Observation, Task, ToolCall

Message = Mapping[str, Any]
_MARGIN_S = 1.0  # so that the episode's own deadline does not come first


class Completer(Protocol):
    """A server of chat completions."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        functions: Sequence[Mapping[str, Any]],
        room: int,
        seed: int | None,
        deadline: float,
    ) -> Completion:
        """At most `room` tokens. After a failure nothing is waited for beyond `deadline` (`time.monotonic`).

        Raises NoRoomError, EngineError, and UserError for what concerns every request.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChatSpeaker:
    """The model behind an endpoint, for episodes with one seed."""

    server: Completer
    config: AgentConfig
    native_calls: bool
    seed: int | None = None

    def begin(self, task: Task, toolbox: Toolbox) -> "ChatConversation":
        """A prompt without room to answer is found by the first `reply` only, which raises DataError."""
        return ChatConversation(self, task, toolbox)


class ChatConversation:
    """A conversation of messages; its turns are for people."""

    def __init__(self, speaker: ChatSpeaker, task: Task, toolbox: Toolbox) -> None:
        self._speaker, self._task_id = speaker, task.id
        self._functions = toolbox.functions if speaker.native_calls else ()
        system, user = opening(speaker.config, task, "" if speaker.native_calls else toolbox.documentation)
        self._messages: list[Message] = [_message("system", system), _message("user", user)]
        self._deadline = time.monotonic() + speaker.config.timeout_s - _MARGIN_S
        self._completion: Completion | None = None
        self._answered: tuple[FunctionCall, ...] = ()  # calls that wait for their tool messages
        self._tokens = 0  # of all finished turns
        self._index = 0

    async def reply(self) -> Reply | None:
        config = self._speaker.config
        room = min(config.max_turn_tokens, config.max_tokens - self._tokens)
        if room < 1:
            return None
        seed = None if self._speaker.seed is None else self._speaker.seed + self._index
        try:
            completion = await self._speaker.server.complete(
                self._messages, functions=self._functions, room=room, seed=seed, deadline=self._deadline
            )
        except NoRoomError as exc:
            if self._index == 0:
                raise DataError(
                    f"task {self._task_id}: the endpoint's model has no room for the prompt and {room} tokens of "
                    f"answer: {exc}; set agent.max_tokens to its context length, agent.max_turn_tokens to less"
                ) from exc
            return None
        if completion.prompt_tokens >= config.max_tokens:
            if self._index == 0:
                raise DataError(
                    f"task {self._task_id}: its prompt has {completion.prompt_tokens} tokens, "
                    f"agent.max_tokens is {config.max_tokens}"
                )
            return None
        self._completion = completion
        fits = self._spent(completion) <= config.max_tokens
        calls = _read_calls(completion.calls) if self._speaker.native_calls else None
        return Reply(completion.content or "", completion.finished and fits, calls)

    def turn(
        self, calls: Sequence[ToolCall], observations: tuple[Observation, ...], seconds: Mapping[str, float]
    ) -> TurnText:
        """`start + prompt` is what the server counted in the prompt; it may be less than the turns before had."""
        completion = self._completion
        if completion is None:
            raise ContractError("a turn was closed that no reply had begun")
        start = min(self._tokens, completion.prompt_tokens)
        turn = TurnText(
            index=self._index,
            start=start,
            prompt=completion.prompt_tokens - start,
            sampled=completion.sampled_tokens,
            policy_version=0,
            cached_tokens=completion.cached_tokens,
            text=_for_people(completion),
            calls=tuple(calls),
            observations=observations,
            seconds=seconds,
        )
        self._messages.append(_assistant(completion, self._speaker.native_calls))
        self._answered = completion.calls if self._speaker.native_calls else ()
        self._tokens = self._spent(completion)
        self._completion = None
        self._index += 1
        return turn

    def observe(self, observations: Sequence[Observation]) -> None:
        texts = [observation.text for observation in observations]
        if self._answered:
            # The toolbox answers the first call, and all others together; a malformed turn is answered as a whole.
            answers = texts[:1] + [texts[-1]] * (len(self._answered) - 1)
            self._messages += [
                {**_message("tool", text), "tool_call_id": call.id}
                for call, text in zip(self._answered, answers, strict=True)
            ]
        elif self._speaker.native_calls:
            self._messages.append(_message("user", "\n".join(texts)))
        else:
            blocks = [f"{RESPONSE}\n{text}\n{RESPONSE_END}" for text in texts]
            self._messages.append(_message("user", "\n".join(blocks)))

    def _spent(self, completion: Completion) -> int:
        """Tokens of prompt, observations and samples. A server that drops reasoning from its prompt does not refund."""
        return max(self._tokens, completion.prompt_tokens) + completion.sampled_tokens


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text.encode(errors="replace").decode()}


def _assistant(completion: Completion, native_calls: bool) -> Message:
    """The model's own message for the history."""
    if not native_calls or not completion.calls:
        return {"role": "assistant", "content": completion.content or ""}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _sendable(call)}}
        for call in completion.calls
    ]
    return {"role": "assistant", "content": completion.content, "tool_calls": calls}


def _sendable(call: FunctionCall) -> str:
    """The arguments, as they came. Chat templates read them as an object: a malformed one would spoil all requests."""
    try:
        return call.arguments if _arguments(call) else "{}"
    except ValueError:
        return json.dumps({"malformed": call.arguments})


def _read_calls(calls: Sequence[FunctionCall]) -> Calls:
    """The first call decides, since no other is run."""
    read: list[ToolCall] = []
    for call in calls:
        try:
            read.append(ToolCall(call.name, _arguments(call)))
        except ValueError as exc:
            if not read:
                return CallProblem("malformed", f"The arguments of {call.name} are not a JSON object: {exc}.")
            read.append(ToolCall(call.name, {"malformed": call.arguments}))
    return read


def _arguments(call: FunctionCall) -> dict[str, object]:
    """Raises ValueError for what is no JSON object of proper text."""
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # an escaped half of a surrogate pair is not text
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _for_people(completion: Completion) -> str:
    """Thought, text and native calls."""
    parts = [f"<think>\n{completion.reasoning.strip()}\n</think>"] if completion.reasoning.strip() else []
    parts += [completion.content] if completion.content else []
    parts += [f"{call.name}({call.arguments})" for call in completion.calls]
    return "\n\n".join(parts)

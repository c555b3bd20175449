"""One chat completion as a server sends it: read leniently, checked for what an episode needs."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_SHOWN_CHARS = 300
_ABORTED = ("abort", "error")  # SGLang, OpenRouter: it was not the model that ended the turn
# OpenAI and vLLM; SGLang; llama.cpp; Anthropic; Gemini; TGI.
_NO_ROOM = re.compile(
    r"context_length_exceeded|maximum context length|tokens'? is too large"
    r"|model's context length|exceeds the maximum allowed length"
    r"|context (size|window)|prompt is too long|input token count|max_new_tokens` must be",
    re.IGNORECASE,
)


class UnusableError(Exception):
    """An answer that holds no completion."""


class NoRoomError(Exception):
    """The prompt and the answer asked for do not fit into the model's context; carries the server's words."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A native call as the model wrote it."""

    id: str
    name: str
    arguments: str  # should be a JSON object


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model said in one turn, and what it cost."""

    content: str | None
    reasoning: str
    calls: tuple[FunctionCall, ...]
    finished: bool  # False when a token limit cut it
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int  # of the prompt, as far as the server says


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Function(_Wire):
    name: str
    arguments: str | dict[str, object] | None = None


class _Call(_Wire):
    id: str | None = None
    function: _Function


class _Message(_Wire):
    content: str | None = None
    reasoning_content: str | None = None  # SGLang, DeepSeek
    reasoning: str | None = None  # vLLM, OpenRouter
    tool_calls: tuple[_Call, ...] | None = None


class _Choice(_Wire):
    message: _Message
    finish_reason: str | None = None


class _PromptDetails(_Wire):
    cached_tokens: int | None = None


class _Usage(_Wire):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(_Wire):
    choices: tuple[_Choice, ...] = Field(min_length=1)
    usage: _Usage


def read_completion(body: bytes) -> Completion:
    """Raises UnusableError, which says what is wrong and what came."""
    try:
        answer = _Answer.model_validate(json.loads(_as_text(json.loads(body))))
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in error["loc"]) or "the answer"
        raise UnusableError(f"no usable completion, {where}: {error['msg']}; it sent: {_shown(body)}") from exc
    except (ValueError, RecursionError) as exc:
        raise UnusableError(f"the answer is not JSON: {_shown(body) or 'nothing'}") from exc
    choice, usage = answer.choices[0], answer.usage
    if choice.finish_reason in _ABORTED:
        raise UnusableError(f"the server ended the turn itself ({choice.finish_reason}): {_shown(body)}")
    message = choice.message
    return Completion(
        content=message.content,
        reasoning=message.reasoning_content or message.reasoning or "",
        calls=_calls(message.tool_calls or ()),
        finished=choice.finish_reason != "length",
        prompt_tokens=usage.prompt_tokens,
        sampled_tokens=usage.completion_tokens,
        cached_tokens=(usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0,
    )


def says_no_room(status: int, said: str) -> bool:
    """Whether a refusal means that the request is too long for the model."""
    return status in (400, 413, 422) and _NO_ROOM.search(said) is not None


def error_message(body: bytes) -> str:
    """What an error answer says, in one line: OpenAI's `error`, FastAPI's `detail`, else its text."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return _shown(body)
    error = tree.get("error", tree) if isinstance(tree, Mapping) else tree
    if isinstance(error, Mapping) and isinstance(error.get("message"), str):
        code = error.get("code")
        return _line(error["message"] + (f" ({code})" if isinstance(code, str) and code else ""))
    return _line(error if isinstance(error, str) else json.dumps(error))


def _as_text(tree: object) -> bytes:
    """JSON can spell half of a surrogate pair, which is no text, and which no server takes back."""
    return json.dumps(tree, ensure_ascii=False).encode(errors="replace")


def _calls(calls: Sequence[_Call]) -> tuple[FunctionCall, ...]:
    """An id that is missing or stands twice is made up, since each call is answered by its id."""
    read: list[FunctionCall] = []
    for place, call in enumerate(calls):
        name, arguments = call.function.name, call.function.arguments
        known = call.id and all(other.id != call.id for other in read)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        read.append(FunctionCall(call.id if call.id and known else f"call_{place}", name, text))
    return tuple(read)


def _shown(body: bytes) -> str:
    return _line(body.decode(errors="replace"))


def _line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARS]

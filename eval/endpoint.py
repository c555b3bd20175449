"""Any OpenAI-compatible server as the model of an evaluation: `async with open_endpoint(config) as endpoint`.

What may pass (429, 5xx, a lost connection, no answer in time, an answer without a completion) is tried again with
growing waits, and is an EngineError if it stays. What concerns every request (key, credit) is a UserError.
"""

import asyncio
import os
import random
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import structlog

from agent_r3.config import Config
from agent_r3.errors import EngineError, UserError
from agent_r3.eval.chat import ChatSpeaker, Message
from agent_r3.eval.completion import (
    Completion,
    NoRoomError,
    UnusableError,
    error_message,
    read_completion,
    says_no_room,
)
from agent_r3.tools.toolbox import Toolbox

try:
    import openai
except ImportError as exc:
    raise UserError("openai is not installed, which eval.endpoint needs; `pip install agent-r3[eval]`") from exc

_ATTEMPTS = 8  # about a minute of waiting in all
_LONGEST_WAIT_S = 60.0
_CONNECT_S = 10.0
_CHECK_ATTEMPTS = 3
_CHECK_TOKENS = 256
_CHECK_S = 120.0
_EVERY_REQUEST = (401, 402, 429)  # refused for the key or its credit; 429 only where it says that none is left
_NO_CREDIT = "insufficient_quota"
# What a server need not know. A sampling option has this value where it changes nothing.
_OPTIONAL: Mapping[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "parallel_tool_calls": False}
_CALL_MARKS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|tool_call")

log = structlog.get_logger(__name__)


class _PassingError(Exception):
    """The request gave nothing, and another one may."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s  # that the server asks for


class _RefusedError(Exception):
    """The server understood, and will not."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"HTTP {status}: {said}")
        self.status, self.said = status, said


class Endpoint:
    """One server and the model asked of it; made by `open_endpoint`."""

    def __init__(self, config: Config, url: str, client: openai.AsyncOpenAI, first_wait_s: float) -> None:
        self._config, self._url, self._client, self._first_wait_s = config, url, client, first_wait_s
        self._limit = "max_tokens"
        self._left_out: set[str] = set()

    def speaker(self, seed: int | None) -> ChatSpeaker:
        """For one episode; turn i is sampled with `seed + i` where the server takes seeds."""
        return ChatSpeaker(self, self._config.agent, self._config.eval.native_calls, seed)

    async def check(self) -> None:
        """One small request. What the server does not know is left out from then on, where that changes nothing.

        Raises UserError, in one line that says what to do, when it cannot serve the evaluation.
        """
        native = self._config.eval.native_calls
        functions = Toolbox(self._config.agent).functions if native else ()
        say = "Call the function `finish` now." if native else "Answer with one word: ready."
        messages = [{"role": "system", "content": "This is a test."}, {"role": "user", "content": say}]
        room = min(_CHECK_TOKENS, self._config.agent.max_turn_tokens)
        while True:
            body = self._body(messages, functions, room, seed=0)
            try:
                completion = await self._persist(body, time.monotonic() + _CHECK_S, _CHECK_ATTEMPTS, _CHECK_S)
                break
            except _RefusedError as exc:
                if not self._adapt(exc, body):
                    raise self._refusal(exc) from exc
            except NoRoomError as exc:
                raise UserError(f"endpoint {self._url}: no room for the tools and an answer: {exc}") from exc
            except EngineError as exc:
                raise UserError(
                    f"{exc}; eval.endpoint must be the base URL of a running OpenAI-compatible server, such as "
                    "http://HOST:PORT/v1"
                ) from exc
        if native and not completion.calls and any(mark in (completion.content or "") for mark in _CALL_MARKS):
            raise UserError(
                f"endpoint {self._url} leaves the model's calls in its text; start the server with a parser of tool "
                "calls (SGLang: --tool-call-parser), or set eval.native_calls=false"
            )

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        functions: Sequence[Mapping[str, Any]],
        room: int,
        seed: int | None,
        deadline: float,
    ) -> Completion:
        """See `chat.Completer`."""
        try:
            body = self._body(messages, functions, room, seed)
            return await self._persist(body, deadline, _ATTEMPTS, self._config.engine.request_timeout_s)
        except _RefusedError as exc:
            if exc.status in _EVERY_REQUEST:
                raise self._refusal(exc) from exc
            raise EngineError(f"endpoint {self._url}: {exc}") from exc

    async def _persist(self, body: Mapping[str, object], deadline: float, attempts: int, limit: float) -> Completion:
        """Ask until there is a completion, `limit` seconds each time.

        After a failure it ends by `deadline`, so that the episode does not: its time-out would be the agent's fault.
        """
        for attempt in range(attempts):
            try:
                return await self._ask(body, limit)
            except _PassingError as exc:
                wait = next_wait(attempt, self._first_wait_s, asked_s=exc.wait_s)
                limit = min(limit, deadline - time.monotonic() - wait)
                if attempt == attempts - 1 or limit <= 0:
                    tries = "" if attempt == 0 else f" (tried {attempt + 1} times)"
                    raise EngineError(f"endpoint {self._url}: {exc}{tries}") from exc
                log.info("endpoint will be asked again", wait_s=round(wait, 2), why=str(exc))
                await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def _ask(self, body: Mapping[str, object], limit_s: float) -> Completion:
        """One request within `limit_s`. Raises _PassingError, _RefusedError, NoRoomError."""
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._client.post("/chat/completions", body=dict(body), cast_to=httpx.Response)
            return read_completion(answer.content)
        except UnusableError as exc:
            raise _PassingError(str(exc)) from exc
        except TimeoutError as exc:
            raise _PassingError(f"no answer within {round(limit_s, 1):g} s") from exc
        except openai.APIConnectionError as exc:
            cause = exc.__cause__ or exc
            raise _PassingError(f"no connection, {type(cause).__name__}: {cause}") from exc
        except openai.APIStatusError as exc:
            status, said = exc.status_code, error_message(exc.response.content)
            if says_no_room(status, said):
                raise NoRoomError(said) from exc
            if (status in (408, 409, 429) or status >= 500) and _NO_CREDIT not in said:
                raise _PassingError(f"HTTP {status}: {said}", _asked_wait(exc.response)) from exc
            raise _RefusedError(status, said) from exc

    def _body(
        self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], room: int, seed: int | None
    ) -> dict[str, object]:
        # Every option is sent, whatever its value: servers have defaults of the model's own, such as top_k=20.
        sampling = self._config.eval.sampling or self._config.sampling
        body: dict[str, object] = {
            "model": self._config.model.path,
            "messages": list(messages),
            self._limit: room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        if seed is not None:
            body["seed"] = seed
        if functions:
            body |= {"tools": list(functions), "parallel_tool_calls": False}
        return {key: value for key, value in body.items() if key not in self._left_out}

    def _adapt(self, refused: _RefusedError, body: Mapping[str, object]) -> bool:
        """Do without what the refusal names, if it can be done without. Returns whether something changed."""
        if self._limit == "max_tokens" and "max_completion_tokens" in refused.said:
            self._limit = "max_completion_tokens"
            return True
        for key, value in body.items():
            optional = key == "seed" or (key in _OPTIONAL and value == _OPTIONAL[key])
            if optional and re.search(rf"\b{key}\b", refused.said):
                log.warning("endpoint does not know an option, which is left out", option=key)
                self._left_out.add(key)
                return True
        return False

    def _refusal(self, refused: _RefusedError) -> UserError:
        variable = self._config.eval.endpoint_key
        match refused.status:
            case 401 | 403:
                known = "is set" if os.environ.get(variable) else "is not set"
                help_ = f"its key is read from the variable {variable} (eval.endpoint_key), which {known}"
            case 404 | 405:
                help_ = (
                    f"model.path must be the name that it knows the model by (now {self._config.model.path!r}), "
                    "and eval.endpoint its base URL, such as http://HOST:PORT/v1"
                )
            case 402 | 429:
                help_ = "the account behind the key has no credit left"
            case _:
                help_ = "it must take chat completions with the options of eval.sampling"
                if self._config.eval.native_calls:
                    help_ += " and with tools; eval.native_calls=false describes these in the prompt instead"
        return UserError(f"endpoint {self._url}: {refused}; {help_}")


@asynccontextmanager
async def open_endpoint(config: Config, *, first_wait_s: float = 0.5) -> AsyncIterator[Endpoint]:
    """The server of `eval.endpoint`. `first_wait_s`: before the second attempt; each further wait is twice as long.

    Raises UserError where `eval.endpoint` is not a URL.
    """
    url = (config.eval.endpoint or "").rstrip("/")
    if not re.match(r"https?://[^/\s]+", url):
        raise UserError(f"eval.endpoint={config.eval.endpoint!r} is not a URL such as http://HOST:PORT/v1")
    client = openai.AsyncOpenAI(
        base_url=url,
        api_key=os.environ.get(config.eval.endpoint_key) or "none",
        max_retries=0,
        timeout=httpx.Timeout(None, connect=_CONNECT_S),  # a request as a whole has its own
    )
    async with client:
        yield Endpoint(config, url, client, first_wait_s)


def next_wait(attempt: int, first_s: float, *, asked_s: float) -> float:
    """Seconds until the next attempt: what the server asked for, else twice as many each time, spread a little."""
    return min(asked_s or first_s * 2**attempt * random.uniform(0.75, 1.25), _LONGEST_WAIT_S)


def _asked_wait(response: httpx.Response) -> float:
    """Seconds of a Retry-After header; 0 where there is none, or a date, which no server of models sends."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        return 0.0

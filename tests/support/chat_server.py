"""An OpenAI-compatible server in the test's own process that follows a script, and episodes against it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from agent_r3.archive import TurnText
from agent_r3.config import Config, config_of
from agent_r3.eval.endpoint import Endpoint, open_endpoint
from agent_r3.rollout.episode import Episode, run_episode
from agent_r3.types import Task, ToolCall
from tests.support.scripted import DictSandbox

Json = dict[str, Any]
Answer = Json | str | Callable[[web.Request], Awaitable[web.Response]]
TASK = Task("t1", "offline", "repo", "image", "Fix it.", {}, "true", "")
LS = ToolCall("execute_bash", {"cmd": "ls"})
FINISH = ToolCall("finish", {"command": "submit"})
OVER = web.AppKey("over", asyncio.Event)


class ChatServer:
    """Answers each request with the next of `script`, the last one for ever; keeps what it was sent."""

    def __init__(self, *script: Answer) -> None:
        self._script = list(script)
        self.requests: list[Json] = []
        self.keys: list[str] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization", ""))
        answer = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if isinstance(answer, str):
            return web.Response(text=answer, content_type="application/json")
        return web.json_response(answer) if isinstance(answer, dict) else await answer(request)

    @property
    def messages(self) -> list[Json]:
        """Of the last request."""
        messages: list[Json] = self.requests[-1]["messages"]
        return messages


@asynccontextmanager
async def serving(*script: Answer) -> AsyncIterator[ChatServer]:
    server = ChatServer(*script)
    app = web.Application()
    app[OVER] = asyncio.Event()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        app[OVER].set()
        await runner.cleanup()


def says(
    content: str | None = None, *calls: Json, finish: str = "stop", usage: Json | None = None, **message: object
) -> Json:
    """An answer of 100 prompt tokens, 7 of them cached, and 10 sampled ones."""
    tokens = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 7}}
    body: Json = {"role": "assistant", "content": content, **message}
    if calls:
        body["tool_calls"] = list(calls)
    choice = {"index": 0, "message": body, "finish_reason": "tool_calls" if calls else finish}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage or tokens}


def native(call_id: str, call: ToolCall, arguments: str | None = None) -> Json:
    text = json.dumps(dict(call.arguments)) if arguments is None else arguments
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": text}}


def status(code: int, message: object = "busy", headers: Mapping[str, str] | None = None) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": message}}, status=code, headers=headers)

    return answer


async def hang(request: web.Request) -> web.Response:
    await request.app[OVER].wait()
    return web.Response()


async def close(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def page(_: web.Request) -> web.Response:
    return web.Response(text="<html>\n<h1>502</h1></html>", content_type="text/html")


DONE = says(None, native("done", FINISH))


def config_for(url: str, **sections: Json) -> Config:
    """Native calls, a short system prompt."""
    tree = {
        "model": {"path": "org/model"},
        "tasks": {"dataset": "offline"},
        "agent": {"system_prompt": "s{tools}", "max_tokens": 4096, **sections.get("agent", {})},
        "eval": {"endpoint": url, **sections.get("eval", {})},
        "engine": {"context_length": 4096, **sections.get("engine", {})},
    }
    return config_of(tree, [], "test")


@asynccontextmanager
async def endpoint_of(server: ChatServer, **sections: Json) -> AsyncIterator[Endpoint]:
    async with open_endpoint(config_for(server.url, **sections), first_wait_s=0.002) as endpoint:
        yield endpoint


async def run(
    server: ChatServer, *, seed: int | None = None, sandbox: DictSandbox | None = None, **sections: Json
) -> Episode[TurnText]:
    async with endpoint_of(server, **sections) as endpoint:
        return await run_episode(endpoint.speaker(seed), TASK, sandbox or DictSandbox(), ignore)


async def ignore(turn: TurnText) -> None:
    """A sink of turns."""

"""An OpenAI-compatible server of its own process whose models are scripts, one a task.

It keeps no state of an episode: which turn comes next is told by the number of assistant messages in the request. So a
client that is killed, or this server, can go on at any time. Every request is a line of its log, written before it is
answered.

    python -m tests.support.scripted_endpoint SCRIPT.json --port PORT --log FILE
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from agent_r3.process import spawn, stop
from agent_r3.rollout.launcher import free_port
from agent_r3.tools.parsers import render
from agent_r3.types import Task, ToolCall

_ROOT = Path(__file__).parents[2]
_START_S = 30.0
FINISH: tuple[str, Mapping[str, str]] = ("finish", {"command": "submit", "result": "done"})
Call = tuple[str, Mapping[str, str]]  # tool, arguments


@dataclass(frozen=True, slots=True)
class Agent:
    """What the model does in one task. Its last turn is given again to whoever asks for more."""

    task_id: str
    prompt: str  # stands in the task's first user message
    turns: Sequence[Call]
    held_from: int | None = None  # turns from this one on are answered only once the server is released


@dataclass(frozen=True, slots=True)
class Script:
    agents: Sequence[Agent]
    latency_s: float = 0.0
    model: str = "scripted"
    others: Sequence[Call] = field(default=(FINISH,))  # for prompts that are no agent's


def bash(command: str) -> Call:
    return "execute_bash", {"cmd": command}


def apply_gold(task: Task) -> Call:
    return bash(f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{task.gold_patch}\nEND_OF_PATCH")


def solver(task: Task, **changes: Any) -> Agent:
    """Looks around, applies the gold patch, submits."""
    return Agent(task.id, task.problem_statement, (bash("git status --short"), apply_gold(task), FINISH), **changes)


def bystander(task: Task, **changes: Any) -> Agent:
    """Changes nothing: an empty patch."""
    return Agent(task.id, task.problem_statement, (bash("git status --short"), FINISH), **changes)


def bungler(task: Task, **changes: Any) -> Agent:
    """Changes something that helps nobody."""
    return Agent(task.id, task.problem_statement, (bash("echo maybe > NOTES.txt"), FINISH), **changes)


class ScriptedEndpoint:
    """The server as a process: `with ScriptedEndpoint(folder, script) as endpoint: endpoint.url`."""

    def __init__(self, folder: Path, script: Script) -> None:
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._script, self._log, self._out = folder / "script.json", folder / "requests.jsonl", folder / "endpoint.log"
        folder.mkdir(parents=True, exist_ok=True)
        self._script.write_text(json.dumps(asdict(script)))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ScriptedEndpoint":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when it answers; after `kill` at the same URL again."""
        options = ["--port", str(self.port), "--log", str(self._log)]
        command = [sys.executable, "-m", "tests.support.scripted_endpoint", str(self._script), *options]
        self._process = spawn(command, log=self._out, env={"PYTHONPATH": str(_ROOT)})
        deadline = time.monotonic() + _START_S
        while True:
            try:
                httpx.get(f"{self.url}/models", trust_env=False).raise_for_status()
                return
            except httpx.TransportError:
                said = self._out.read_text(errors="replace")
                assert self._process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            asyncio.run(stop(self._process, grace_s=0.0))
            self._process = None

    def release(self) -> None:
        """Answer what is held, and hold nothing any more."""
        httpx.post(f"{self.url}/release", trust_env=False).raise_for_status()

    def requests(self) -> list[dict[str, Any]]:
        """Every request so far: task (None for one of no agent), turn, seed."""
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def begun(self) -> Counter[str]:
        """Task -> how many episodes asked for its first turn."""
        return Counter(request["task"] for request in self.requests() if request["task"] and request["turn"] == 0)


class _Server:
    def __init__(self, script: Script, log: Path) -> None:
        self._script, self._log = script, log
        self._released = asyncio.Event()
        self._asked = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/release", self.release)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._script.model, "object": "model"}]})

    async def release(self, request: web.Request) -> web.Response:
        self._released.set()
        return web.json_response({})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body["messages"]
        agent = self._agent_of(messages)
        number = sum(message["role"] == "assistant" for message in messages)
        self._write({"task": agent.task_id if agent else None, "turn": number, "seed": body.get("seed")})
        if agent is not None and agent.held_from is not None and number >= agent.held_from:
            await self._released.wait()
        await asyncio.sleep(self._script.latency_s)
        turns = agent.turns if agent else self._script.others
        self._asked += 1
        return web.json_response(_completion(body, turns[min(number, len(turns) - 1)], self._asked))

    def _agent_of(self, messages: Sequence[Mapping[str, Any]]) -> Agent | None:
        first = next(str(message["content"]) for message in messages if message["role"] == "user")
        return next((agent for agent in self._script.agents if agent.prompt in first), None)

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(entry) + "\n")


def _completion(body: Mapping[str, Any], call: Call, number: int) -> dict[str, Any]:
    """With tools in the request the call is a native one, else it stands in the text. Ids are all of one length."""
    name, arguments = call
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if body.get("tools"):
        function = {"name": name, "arguments": json.dumps(arguments)}
        message["tool_calls"] = [{"id": f"call_{number:06d}", "type": "function", "function": function}]
    else:
        message["content"] = render(ToolCall(name, arguments), "r2e_xml")
    prompt, sampled = len(json.dumps(body["messages"])) // 4, len(json.dumps(call)) // 4
    return {
        "id": f"completion-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if body.get("tools") else "stop"}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def _read(path: Path) -> Script:
    fields = json.loads(path.read_text())
    fields["agents"] = [Agent(**agent) for agent in fields["agents"]]
    return Script(**fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    server = _Server(_read(options.script), options.log)
    web.run_app(server.app(), host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()

"""The tools an agent has: registry, parsing, checking and running of calls.

Whatever a model writes ends in a defined observation; only SandboxError, which is not the model's doing, is raised.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from agent_r3.config import AgentConfig
from agent_r3.envs.sandbox import Sandbox
from agent_r3.errors import ConfigError
from agent_r3.tools.base import Arguments, Tool
from agent_r3.tools.documentation import describe, function_schema, parameters
from agent_r3.tools.execute_bash import ExecuteBash, PersistentBash
from agent_r3.tools.file_editor import FileEditor
from agent_r3.tools.finish import Finish
from agent_r3.tools.limits import cut_chars
from agent_r3.tools.parsers import CallProblem, parse
from agent_r3.tools.search import Search
from agent_r3.types import Observation, ToolCall

REGISTRY: Mapping[str, Callable[[AgentConfig], Tool]] = {
    FileEditor.name: lambda config: FileEditor(config.command_timeout_s, config.observation_lines),
    ExecuteBash.name: lambda config: (PersistentBash if config.persistent_shell else ExecuteBash)(
        config.command_timeout_s, config.observation_lines
    ),
    Search.name: lambda config: Search(config.command_timeout_s, config.observation_lines),
    Finish.name: lambda config: Finish(),
}


def check_tools(config: AgentConfig) -> None:
    """Raises ConfigError for a tool that is not registered."""
    unknown = [name for name in config.tools if name not in REGISTRY]
    if unknown:
        raise ConfigError(f"agent.tools: unknown tool {unknown[0]!r}; known: {', '.join(REGISTRY)}")


class Toolbox:
    """The configured tools. It holds no state of an episode, so that one serves all episodes of a worker.

    Raises ConfigError for a tool that is not registered.
    """

    def __init__(self, config: AgentConfig) -> None:
        check_tools(config)
        self._tools = {name: REGISTRY[name](config) for name in config.tools}
        self._format = config.call_format
        self._max_chars = config.observation_chars
        kinds = tuple(type(tool) for tool in self._tools.values())
        self.documentation: str = describe(kinds, self._format)
        """The tools and how to call them, for the system prompt."""
        self.functions: tuple[Mapping[str, Any], ...] = tuple(function_schema(kind) for kind in kinds)
        """The same for models that are offered tools as functions, with JSON schemas."""

    async def step(self, text: str, sandbox: Sandbox) -> tuple[tuple[ToolCall, ...], tuple[Observation, ...]]:
        """Parse a turn and run its first call. Returns the calls and at least one observation; see `run`."""
        calls = self.parse(text)
        observations = await self.run(calls, sandbox)
        return () if isinstance(calls, CallProblem) else tuple(calls), observations

    def parse(self, text: str) -> list[ToolCall] | CallProblem:
        """The calls of a turn in the configured syntax, or why there is none. Never raises."""
        return parse(text, self._format)

    async def run(self, calls: Sequence[ToolCall] | CallProblem, sandbox: Sandbox) -> tuple[Observation, ...]:
        """Run the first call and answer it; a second observation says that further calls were not run.

        No call, an unknown tool and bad arguments are answered with `is_error`. Raises SandboxError only.
        """
        if isinstance(calls, CallProblem):
            return (self._refuse(f"{calls.message} Call one of: {', '.join(self._tools)}."),)
        if not calls:
            return (self._refuse(f"The turn holds no tool call. Call one of: {', '.join(self._tools)}."),)
        observation = await self._run_one(calls[0], sandbox)
        if len(calls) == 1:
            return (observation,)
        others = ", ".join(call.name for call in calls[1:])
        return observation, self._refuse(f"Only the first call of a turn is run; not run: {others}.")

    async def _run_one(self, call: ToolCall, sandbox: Sandbox) -> Observation:
        tool = self._tools.get(call.name)
        if tool is None:
            return self._refuse(f"There is no tool {call.name!r}. Call one of: {', '.join(self._tools)}.")
        try:
            arguments = tool.arguments.model_validate(dict(call.arguments))
        except ValidationError as exc:
            return self._refuse(f"Bad arguments for {call.name}: {_explain(exc, tool.arguments)}.")
        observation = await tool.run(arguments, sandbox)
        return Observation(cut_chars(observation.text, self._max_chars), observation.is_error, observation.finished)

    def _refuse(self, text: str) -> Observation:
        return Observation(cut_chars(text, self._max_chars), is_error=True)


def _explain(error: ValidationError, arguments: type[Arguments]) -> str:
    return "; ".join(_explain_one(one, arguments) for one in error.errors(include_url=False, include_input=False))


def _explain_one(error: Any, arguments: type[Arguments]) -> str:
    where = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        return f"there is no parameter `{where}` (there are: {', '.join(parameters(arguments))})"
    if error["type"] == "missing":
        return f"`{where}` is missing"
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return f"`{where}` {message}" if where else message

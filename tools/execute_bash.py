"""`execute_bash`: one command in a shell of the container, a fresh one each time or one that carries on."""

from typing import ClassVar

from pydantic import AliasChoices, Field

from agent_r3.envs.sandbox import ExecResult, Sandbox
from agent_r3.tools.base import Arguments, ShellText
from agent_r3.tools.limits import cut_lines, strip_escapes
from agent_r3.types import Observation


class ExecuteBashArguments(Arguments):
    # Newer R2E-like scaffolds call it `command`.
    cmd: ShellText = Field(validation_alias=AliasChoices("cmd", "command"), min_length=1)
    """The command. It runs in a fresh shell in the repository's root; nothing but files lasts from call to call."""


class ExecuteBash:
    name: ClassVar[str] = "execute_bash"
    description: ClassVar[str] = (
        "Run a shell command. The answer holds the exit code and the output; of a long output the first and last lines."
    )
    arguments: ClassVar[type[Arguments]] = ExecuteBashArguments
    persistent: ClassVar[bool] = False

    def __init__(self, timeout_s: float, max_lines: int) -> None:
        self._timeout_s = timeout_s
        self._max_lines = max_lines

    async def run(self, arguments: ExecuteBashArguments, sandbox: Sandbox) -> Observation:
        result = await sandbox.exec(arguments.cmd, timeout_s=self._timeout_s, persistent=self.persistent)
        return Observation(render_result(result, self._timeout_s, self._max_lines))


class PersistentBashArguments(ExecuteBashArguments):
    cmd: ShellText = Field(validation_alias=AliasChoices("cmd", "command"), min_length=1)
    """The command. Its shell starts in the repository's root; directory, variables and functions stay from call to
    call, background processes do not."""


class PersistentBash(ExecuteBash):
    """`execute_bash` for agents that expect cd and export to last (`agent.persistent_shell`)."""

    arguments: ClassVar[type[Arguments]] = PersistentBashArguments
    persistent: ClassVar[bool] = True


def render_result(result: ExecResult, timeout_s: float, max_lines: int) -> str:
    """Exit code, then the output cut to `max_lines`; a time-out and dropped bytes are told."""
    head = f"Exit code {result.exit_code}."
    if result.timed_out:
        head += f" The command did not end within {timeout_s:g} s; it and its child processes were killed."
    if result.truncated:
        head += f" It wrote {result.total_bytes} bytes; the middle was dropped."
    output = strip_escapes(result.text).rstrip("\n")
    return f"{head}\n{cut_lines(output, max_lines)}" if output else f"{head} No output."

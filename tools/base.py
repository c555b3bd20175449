"""What a tool is: a name, a typed set of arguments and one coroutine that acts on the sandbox.

A tool sees the container only through `Sandbox`. What goes wrong in the container because of what the agent asked
(no such file, time-out) is text for the agent; a `SandboxError` passes through, since it is not the agent's doing.
"""

from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from agent_r3.envs.sandbox import Sandbox
from agent_r3.types import Observation


class Arguments(BaseModel):
    """Arguments of one tool. A field's docstring becomes its description; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Tool(Protocol):
    """One tool. It keeps nothing of an episode: what must last lies in the container."""

    name: ClassVar[str]
    description: ClassVar[str]
    arguments: ClassVar[type[Arguments]]

    async def run(self, arguments: Any, sandbox: Sandbox) -> Observation:
        """Act on the sandbox. `arguments` is an instance of the class's `arguments`. SandboxError passes through."""
        ...


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL character")
    return value


def _blank_is_absent(value: object) -> object:
    # Models write an optional number they do not want as an empty string or as Python's None.
    return None if isinstance(value, str) and value.strip() in ("", "None", "null") else value


ShellText = Annotated[str, AfterValidator(_without_nul)]
"""Text that can be handed to a process: no NUL."""

BlankIsAbsent = BeforeValidator(_blank_is_absent)

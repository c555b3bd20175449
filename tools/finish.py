"""`finish`: the agent says that it is done. The repository as it stands is what gets graded."""

from typing import ClassVar, Literal

from agent_r3.envs.sandbox import Sandbox
from agent_r3.tools.base import Arguments
from agent_r3.types import Observation


class FinishArguments(Arguments):
    command: Literal["submit"] = "submit"
    """Always `submit`."""
    result: str | None = None
    """Optional summary of what was done."""


class Finish:
    name: ClassVar[str] = "finish"
    description: ClassVar[str] = "End the episode and hand in the repository as it stands."
    arguments: ClassVar[type[Arguments]] = FinishArguments

    async def run(self, arguments: FinishArguments, sandbox: Sandbox) -> Observation:
        return Observation("Submitted.", finished=True)

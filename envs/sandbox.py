"""The sandbox protocol: what the agent loop, the tools and the grader may ask of a container.

Backends raise SandboxError for whatever is the infrastructure's fault; a command that fails or times out is a result.
"""

from dataclasses import dataclass
from typing import Protocol

from agent_r3.types import Task


@dataclass(frozen=True, slots=True)
class ExecResult:
    """A finished command. `output` is stdout and stderr as they came; head and tail are kept when it was too long."""

    output: bytes
    total_bytes: int
    exit_code: int  # 124 when timed_out
    timed_out: bool
    truncated: bool
    seconds: float

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", errors="replace")


class FileMissingError(Exception):
    """`Sandbox.get` found no regular file at the path. Data for the agent, not an infrastructure failure."""


class Sandbox(Protocol):
    """One running container that belongs to one episode or one grading."""

    id: str

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        """Run `command` in a fresh bash, by default in the workdir. At the deadline all its descendants are killed."""
        ...

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file (absolute path), making its folders. An error inside is FileMissingError or OSError."""
        ...

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Read a regular file. Raises FileMissingError; OSError when it is larger than max_bytes."""
        ...

    async def diff(self) -> bytes:
        """The agent's change to the workdir against its base commit, as one binary-safe `git diff`."""
        ...

    async def close(self) -> None:
        """Remove the container. Idempotent, shielded from cancellation, never raises for a container that is gone."""
        ...


class SandboxProvider(Protocol):
    """Hands out fresh containers. In one process it is the Docker pool; behind the broker it is a client."""

    async def prefetch(self, tasks: list[Task]) -> None:
        """Say which tasks come next, in order, so that their containers can be started ahead of need."""
        ...

    async def acquire(self, task: Task) -> Sandbox:
        """A fresh container for the agent: set up, hidden tests gone, one base commit. The caller closes it."""
        ...

    async def acquire_for_grading(self, task: Task) -> Sandbox:
        """A fresh container in which the hidden tests may be put and run. The caller closes it."""
        ...

    async def close(self) -> None:
        """Remove every container of this provider."""
        ...

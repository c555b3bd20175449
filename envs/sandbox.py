"""The sandbox protocol: what the agent loop, the tools and the grader may ask of a container.

Backends raise SandboxError for whatever is the infrastructure's fault; a command that fails or times out is a result.
"""

from dataclasses import dataclass
from typing import Protocol

from agent_r3.types import Grade, Task


@dataclass(frozen=True, slots=True)
class ExecResult:
    """A finished command. `output` is stdout and stderr as they came; head and tail are kept when it was too long."""

    output: bytes
    total_bytes: int
    exit_code: int  # 124 when timed_out
    timed_out: bool
    truncated: bool
    seconds: float
    report: bytes = b""  # what was written to descriptor 3

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", errors="replace")


MAX_STDIN = 60_000  # bytes: fits a pipe's buffer, so that nobody has to feed it


class FileMissingError(Exception):
    """`Sandbox.get` found no regular file at the path. Data for the agent, not an infrastructure failure."""


class Sandbox(Protocol):
    """One running container that belongs to one episode or one grading."""

    id: str

    @property
    def protected(self) -> bool:
        """Whether no process inside can answer in the runner's place; False in images without a usable Python."""
        ...

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        max_output_bytes: int = 1 << 20,
        persistent: bool = False,
        stdin: bytes = b"",
        max_report_bytes: int = 0,
    ) -> ExecResult:
        """Run `command` in a fresh bash, by default in the workdir. At the deadline all its descendants are killed.

        `persistent`: start from the directory, variables and functions that the last persistent command left
        (`cwd` is for the first one). `stdin`: at most MAX_STDIN bytes. With `max_report_bytes` the command has a pipe
        at descriptor 3, which nobody but its own processes can write; of a longer report one byte more comes back.
        """
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
    """Hands out fresh sandboxes. In one process it is the pool; behind the broker it is a client."""

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


class Grading(Protocol):
    """Turns patches into rewards. In one process it is `Grader`; behind the broker it is a client."""

    async def grade(self, task: Task, patch: bytes) -> Grade:
        """The hidden tests' verdict on `patch`, from a fresh sandbox. Raises GradingError for a failure of ours."""
        ...

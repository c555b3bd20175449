"""A sandbox whose PID 1 is our runner, whatever started it: commands, files and the agent's change over one channel."""

from collections.abc import Callable

import structlog

from agent_r3.envs import workdir
from agent_r3.envs.channel import Channel
from agent_r3.envs.sandbox import MAX_STDIN, ExecResult, FileMissingError
from agent_r3.envs.shell import persistent as from_last_state
from agent_r3.errors import DataError, SandboxError
from agent_r3.types import Task

log = structlog.get_logger(__name__)

_GRACE_S = 15.0  # host deadline above the runner's own: it covers a crowded machine, not a slow command
_FILE_TIMEOUT_S = 60.0
_SET_UP_TIMEOUT_S = 300.0
_DIFF_TIMEOUT_S = 120.0
_LARGEST_DIFF = 64 << 20


class RunnerSandbox:
    """`base` is the tree the agent started from, None in a sandbox for grading.

    `on_close` is called once, when the channel has been closed: it sees to it that the sandbox goes.
    """

    def __init__(self, name: str, task: Task, channel: Channel, on_close: Callable[["RunnerSandbox"], None]) -> None:
        self.id = name
        self.task = task
        self.base: str | None = None
        self._channel = channel
        self._on_close = on_close
        self._closed = False
        self._fate: SandboxError | None = None

    @property
    def alive(self) -> bool:
        return self._channel.alive

    @property
    def silent(self) -> bool:
        """It did not answer in time and may not end by itself."""
        return self._channel.silent

    @property
    def protected(self) -> bool:
        return self._channel.protected

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
        """Run `command` in a fresh bash; see the protocol.

        A cancelled call ends the command and leaves the sandbox usable. Processes that a command leaves behind are
        ended with it. Output without end (256 MiB) ends it too, with the exit code of SIGXFSZ, 153.
        """
        if len(stdin) > MAX_STDIN:
            raise ValueError(f"{len(stdin)} bytes for stdin; at most {MAX_STDIN} can be given")
        script = from_last_state(command) if persistent else command
        prologue = workdir.prologue(self.task, for_agent=self.base is not None)
        answer = await self._request(
            b"run",
            (prologue + script).encode(errors="replace"),
            (cwd or self.task.workdir).encode(errors="replace"),
            b"%d" % max(1, round(timeout_s * 1000)),
            b"%d" % max_output_bytes,
            stdin,
            b"%d" % max_report_bytes,
            timeout_s=timeout_s + _GRACE_S,
        )
        kind, head, tail, total, code, why, micros, report = answer
        if kind != b"done":
            raise SandboxError(f"{self.id}: the runner answered {kind!r} to run")
        left_out = int(total) - len(head) - len(tail)
        cut = b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""
        return ExecResult(
            output=head + cut + tail,
            total_bytes=int(total),
            exit_code={b"timeout": 124, b"flood": 153}.get(why, int(code)),
            timed_out=why == b"timeout",
            truncated=left_out > 0,
            seconds=int(micros) / 1e6,
            report=report,
        )

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file; see the protocol. An existing file keeps its mode, a link is followed."""
        await self._file_request(path, b"put", b"%d" % mode, data)

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Read a regular file; see the protocol."""
        return (await self._file_request(path, b"get", b"%d" % max_bytes))[1]

    async def _request(self, *fields: bytes, timeout_s: float) -> list[bytes]:
        try:
            return await self._channel.request(*fields, timeout_s=timeout_s)
        except SandboxError as exc:
            self.close_nowait()
            raise (self._fate or exc) from exc

    async def _file_request(self, path: str, operation: bytes, *fields: bytes) -> list[bytes]:
        if not path.startswith("/"):
            raise OSError(22, "not an absolute path", path)
        raw = path.encode(errors="surrogateescape")
        answer = await self._request(operation, raw, *fields, timeout_s=_FILE_TIMEOUT_S)
        match answer:
            case [b"missing", why]:
                raise FileMissingError(f"{path}: {why.decode(errors='replace')}")
            case [b"oserror", number, why]:
                raise OSError(int(number), why.decode(errors="replace"), path)
        return answer

    async def set_up(self) -> None:
        """Take the hidden tests out, make git usable, record the base. Raises DataError, SandboxError."""
        if self.task.bug_patch:
            await self.put(workdir.BUG_PATCH, self.task.bug_patch.encode())
        result = await self.exec(workdir.set_up(self.task), timeout_s=_SET_UP_TIMEOUT_S, cwd="/")
        if result.exit_code == workdir.UNUSABLE:
            raise DataError(f"image {self.task.image} of task {self.task.id} cannot be used: {result.text.strip()}")
        if result.exit_code:
            raise SandboxError(f"{self.id}: set-up ended with {result.exit_code}: {result.text.strip()[-500:]}")
        self.base = result.text.split()[-1]

    async def diff(self) -> bytes:
        """The agent's change as one `git diff`; see the protocol.

        Empty where the agent has made it unmeasurable, for instance by deleting git: that is its own doing, and logged.
        Untracked files above 16 MiB are left out; a change above 64 MiB counts as unmeasurable.
        """
        if self.base is None:
            raise RuntimeError(f"{self.id} was not set up for an agent and has no base to compare with")
        script = workdir.diff(self.task.workdir, self.base)
        result = await self.exec(script, timeout_s=_DIFF_TIMEOUT_S, cwd="/", max_output_bytes=2 * _LARGEST_DIFF)
        if result.exit_code or result.total_bytes > _LARGEST_DIFF:
            reason = result.text[-300:] if result.exit_code else f"{result.total_bytes} bytes"
            log.warning("no usable diff", sandbox=self.id, task=self.task.id, exit_code=result.exit_code, reason=reason)
            return b""
        return result.output

    def end(self, fate: SandboxError) -> None:
        """End it from outside; whoever uses it gets `fate`."""
        self._fate = fate
        self.close_nowait()

    async def close(self) -> None:
        """End the sandbox. Its removal is awaited when its host is closed."""
        self.close_nowait()

    def close_nowait(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._on_close(self)

"""Docker: one container is one sandbox, with our runner as PID 1 on a socket attached before it starts.

A container lives as long as its socket: when the host closes it, or the host's process dies, the runner reads the end
of its input, exits, and the engine removes the container (`auto_remove`). Nothing is ever exec'd into a container.
"""

import asyncio
import functools
import inspect
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import docker
import structlog
from docker.errors import NotFound
from docker.types import LogConfig, Ulimit
from docker.utils import parse_bytes

from agent_r3.config import SandboxConfig
from agent_r3.envs import runner, workdir
from agent_r3.envs.channel import Channel
from agent_r3.envs.docker import (
    DEADLINE_LABEL,
    FAULTS,
    OWNER_LABEL,
    RUN_LABEL,
    await_removal,
    connect,
    force_removal,
    owner_label,
)
from agent_r3.envs.sandbox import ExecResult, FileMissingError
from agent_r3.errors import DataError, SandboxError, boundary
from agent_r3.types import Task

log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LIFETIME_S = 4 * 3600  # for the deadline label; far above an episode's or a grading's time limit
_GRACE_S = 15.0  # host deadline above the runner's own: it covers a crowded machine, not a slow command
_FILE_TIMEOUT_S = 60.0
_DIFF_TIMEOUT_S = 120.0
_LARGEST_DIFF = 64 << 20

# The image's own Python, wherever it keeps one. The shell turns into it, so the runner is PID 1.
_LAUNCH = """
for python in python3 /testbed/.venv/bin/python /root/.venv/bin/python /opt/miniconda3/bin/python python; do
    command -v "$python" >/dev/null 2>&1 && exec "$python" -I -S -B -c "$0"
done
echo "the image has no Python, neither on PATH nor in a known virtual environment" >&2
exit 127
"""
_SOURCE = inspect.getsource(runner)


class DockerSandbox:
    """A started container. `base` is the tree the agent started from, None in a container for grading."""

    def __init__(self, host: "DockerHost", name: str, task: Task, channel: Channel) -> None:
        self.id = name
        self.base: str | None = None
        self._host = host
        self._task = task
        self._channel = channel
        self._removal: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._channel.alive

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        """Run `command` in a fresh bash; see the protocol.

        A cancelled call ends the command and leaves the sandbox usable. Processes that a command leaves behind are
        ended with it. Output without end (256 MiB) ends it too, with the
        exit code of SIGXFSZ, 153.
        """
        answer = await self._request(
            b"run",
            command.encode(errors="replace"),
            (cwd or self._task.workdir).encode(errors="replace"),
            b"%d" % max(1, round(timeout_s * 1000)),
            b"%d" % max_output_bytes,
            timeout_s=timeout_s + _GRACE_S,
        )
        kind, head, tail, total, code, why, micros = answer
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
        except SandboxError:
            self.close_nowait()
            raise

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
        script = workdir.set_up(self._task.workdir)
        result = await self.exec(script, timeout_s=_DIFF_TIMEOUT_S, cwd="/")
        if result.exit_code == workdir.UNUSABLE:
            raise DataError(f"image {self._task.image} of task {self._task.id} cannot be used: {result.text.strip()}")
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
        script = workdir.diff(self._task.workdir, self.base)
        result = await self.exec(script, timeout_s=_DIFF_TIMEOUT_S, cwd="/", max_output_bytes=2 * _LARGEST_DIFF)
        if result.exit_code or result.total_bytes > _LARGEST_DIFF:
            reason = result.text[-300:] if result.exit_code else f"{result.total_bytes} bytes"
            log.warning(
                "no usable diff", sandbox=self.id, task=self._task.id, exit_code=result.exit_code, reason=reason
            )
            return b""
        return result.output

    async def close(self) -> None:
        """End the container; the engine removes it. Its removal is awaited when the host is closed."""
        self.close_nowait()

    def close_nowait(self) -> None:
        if self._removal is None:
            self._channel.close()
            self._removal = self._host.remove(self.id, force=self._channel.silent)


class DockerHost:
    """Starts and removes containers of one run. Blocking calls of the Docker SDK run in threads of its own."""

    def __init__(self, config: SandboxConfig, run: str, owner: str) -> None:
        self._api = connect(math.ceil(config.start_timeout_s))
        self._config = config
        self._labels = {RUN_LABEL: run, OWNER_LABEL: owner_label(owner)}
        self._removing = asyncio.Semaphore(8)
        self._starting = asyncio.Semaphore(config.max_starting)
        self._threads = ThreadPoolExecutor(config.max_starting + 8, thread_name_prefix="docker")
        self._removals: set[asyncio.Task[None]] = set()
        self._images: set[str] = set()  # known to be there

    async def require_image(self, task: Task) -> None:
        """Raises DataError when the task's image is not on this engine."""
        if task.image not in self._images:
            with boundary(SandboxError, f"look for image {task.image}", *FAULTS):
                try:
                    await self._in_thread(self._api.inspect_image, task.image)
                except NotFound as exc:
                    raise _missing_image(task) from exc
            self._images.add(task.image)

    async def start(self, task: Task) -> DockerSandbox:
        """A started container whose runner answers. Raises DataError, SandboxError.

        Not to be cancelled (a thread cannot be): DockerPool lets it finish in a task of its own.
        """
        name = f"agent-r3-{uuid.uuid4().hex[:16]}"
        channel: Channel | None = None
        async with self._starting:
            try:
                with boundary(SandboxError, f"start container {name} of {task.image}", *FAULTS):
                    sock = await self._in_thread(self._create, name, task)
                channel = await Channel.over(sock, f"container {name} of {task.image}")
                await channel.ready(self._config.start_timeout_s)
            except BaseException:
                if channel is not None:
                    channel.close()
                self.remove(name, force=True)
                raise
        return DockerSandbox(self, name, task, channel)

    def _create(self, name: str, task: Task) -> socket.socket:
        config = self._config
        size = int(parse_bytes(config.file_size))
        host_config = self._api.create_host_config(
            network_mode="none",
            mem_limit=config.memory,
            memswap_limit=config.memory,
            nano_cpus=round(config.cpus * 1e9),
            pids_limit=config.pids,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            log_config=LogConfig(type="none", config={}),
            ulimits=[Ulimit(name="fsize", soft=size, hard=size), Ulimit(name="core", soft=0, hard=0)],
            auto_remove=True,
        )
        try:
            self._api.create_container(
                task.image,
                command=[_SOURCE],
                entrypoint=["/bin/sh", "-c", _LAUNCH],
                name=name,
                working_dir="/",
                stdin_open=True,
                tty=False,
                # The same isolation as network "none", without the call back into the daemon that costs as much as
                # all the rest of a start.
                network_disabled=True,
                labels={**self._labels, DEADLINE_LABEL: str(int(time.time()) + _LIFETIME_S)},
                host_config=host_config,
            )
        except NotFound as exc:
            raise _missing_image(task) from exc
        attached = self._api.attach_socket(name, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        sock = _own_socket(attached)
        try:
            self._api.start(name)
        except BaseException:
            sock.close()
            raise
        return sock

    def remove(self, name: str, *, force: bool = False) -> asyncio.Task[None]:
        """See a container off in the background; `close` waits for it.

        Its socket was closed and it goes by itself; `force` is for one that never answered.
        """
        removal = asyncio.create_task(self._remove(name, force_removal if force else await_removal))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        return removal

    async def _remove(self, name: str, how: Callable[[docker.APIClient, str], None]) -> None:
        async with self._removing:
            try:
                await self._in_thread(how, self._api, name)
            except FAULTS as exc:
                log.warning("container not removed; `reap` will", container=name, error=str(exc))

    async def close(self) -> None:
        """Wait for the removals and end the threads."""
        while self._removals:
            await asyncio.wait(self._removals)
        self._threads.shutdown(wait=False)
        self._api.close()

    async def _in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(call, *args, **kwargs))


def _own_socket(attached: Any) -> socket.socket:
    """A socket of ours for the hijacked connection; the SDK's HTTP response is closed, or its descriptor would stay."""
    try:
        return socket.socket(fileno=os.dup(attached.fileno()))
    finally:
        attached._response.close()


def _missing_image(task: Task) -> DataError:
    offline = task.dataset == "offline"
    mend = "build it with `agent-r3 tasks build offline`" if offline else f"get it with `docker pull {task.image}`"
    return DataError(f"image {task.image} of task {task.id} is not on this Docker engine; {mend}")

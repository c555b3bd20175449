"""Docker as a host of sandboxes: our runner is PID 1 of each container, on a socket attached before it starts.

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
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import docker
import structlog
from docker.errors import NotFound
from docker.types import LogConfig, Ulimit
from docker.utils import parse_bytes

from agent_r3.config import SandboxConfig
from agent_r3.envs import runner
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
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.errors import DaemonError, DataError, boundary
from agent_r3.types import Task

log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LIFETIME_S = 4 * 3600  # for the deadline label; far above an episode's or a grading's time limit

# The image's own Python, wherever it keeps one. The shell turns into it, so the runner is PID 1.
_LAUNCH = """
for python in python3 /testbed/.venv/bin/python /root/.venv/bin/python /opt/miniconda3/bin/python python; do
    command -v "$python" >/dev/null 2>&1 && exec "$python" -I -S -B -c "$0"
done
echo "the image has no Python, neither on PATH nor in a known virtual environment" >&2
exit 127
"""
_SOURCE = inspect.getsource(runner)


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
            with boundary(DaemonError, f"look for image {task.image}", *FAULTS):
                try:
                    await self._in_thread(self._api.inspect_image, task.image)
                except NotFound as exc:
                    raise _missing_image(task) from exc
            self._images.add(task.image)

    async def start(self, task: Task) -> RunnerSandbox:
        """A started container whose runner answers. Raises DataError, SandboxError.

        Not to be cancelled (a thread cannot be): SandboxPool lets it finish in a task of its own.
        """
        name = f"agent-r3-{uuid.uuid4().hex[:16]}"
        channel: Channel | None = None
        async with self._starting:
            try:
                with boundary(DaemonError, f"start container {name} of {task.image}", *FAULTS):
                    sock = await self._in_thread(self._create, name, task)
                channel = await Channel.over_attached(sock, f"container {name} of {task.image}")
                await channel.ready(self._config.start_timeout_s)
            except BaseException:
                if channel is not None:
                    channel.close()
                self.remove(name, force=True)
                raise
        return RunnerSandbox(name, task, channel, lambda sandbox: self.remove(name, force=sandbox.silent))

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

    def remove(self, name: str, *, force: bool = False) -> None:
        """See a container off in the background; `close` waits for it.

        Its socket was closed and it goes by itself; `force` is for one that never answered.
        """
        removal = asyncio.create_task(self._remove(name, force_removal if force else await_removal))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, name: str, how: Callable[[docker.APIClient, str], None]) -> None:
        async with self._removing:
            try:
                await self._in_thread(how, self._api, name)
            except FAULTS as exc:
                log.warning("container not removed; `reap` will", container=name, error=str(exc))

    async def maintain(self, sandboxes: Collection[RunnerSandbox]) -> None:
        """See the protocol."""

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

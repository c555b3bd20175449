"""Docker as a host of sandboxes: our runner is PID 1 of each container, on a socket attached before it starts.

A container lives as long as its socket: when the host closes it, or the host's process dies, the runner reads the end
of its input, exits, and the engine removes the container (`auto_remove`). Nothing is ever exec'd into a container.
"""

import asyncio
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

import structlog
from docker.errors import APIError, NotFound
from docker.types import LogConfig, Ulimit
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
    wait_random,
)

from agent_r3.config import SandboxConfig
from agent_r3.envs.channel import Channel
from agent_r3.envs.docker import (
    DEADLINE_LABEL,
    OWNER_LABEL,
    RUN_LABEL,
    connect,
    remove_left_over,
)
from agent_r3.envs.docker_faults import FAULTS, Threads, engine_boundary, may_pass, outcome_unknown
from agent_r3.envs.docker_images import DockerImages
from agent_r3.envs.docker_removal import Removals
from agent_r3.envs.launch import LAUNCH, RUNNER, UNUSABLE
from agent_r3.envs.owners import owner_label
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.envs.sizes import Sizes
from agent_r3.errors import DataError, DiskFullError, SandboxDeadError, SandboxError
from agent_r3.types import Task

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LIFETIME_S = 4 * 3600  # for the deadline label; far above an episode's or a grading's time limit


class _ImageGoneError(Exception):
    """The engine has no image of this id any more."""


class DockerHost:
    """Starts and removes containers of one run. An engine that is away or overloaded is waited for.

    What is waited is `start_timeout_s` at most, and then the last attempt's own time.
    """

    def __init__(self, config: SandboxConfig, run: str, owner: str) -> None:
        self._api = connect(math.ceil(config.start_timeout_s))
        self._config = config
        self._labels = {RUN_LABEL: run, OWNER_LABEL: owner_label(owner)}
        self._starting = asyncio.Semaphore(config.max_starting)
        self._threads = Threads(config.max_starting + 8, "docker")
        self._images = DockerImages(self._api, config)
        self._removals = Removals(self._api, self._threads)
        self._sizes = Sizes.of(config)
        self._hurry = threading.Event()
        self._closed = False

    async def require_image(self, task: Task) -> None:
        """See that the task's image is here or on its way. Raises DataError, SandboxError."""
        self._check_network(task)
        await self._patiently(self._images.ahead, task)

    async def start(self, task: Task) -> RunnerSandbox:
        """A started container whose runner answers. Raises DataError, SandboxError.

        Not to be cancelled (a thread cannot be): SandboxPool lets it finish in a task of its own.
        """
        self._check_network(task)
        return await self._patiently(self._start, task)

    async def _patiently(self, attempt: Callable[[Task], Awaitable[T]], task: Task) -> T:
        def report(state: RetryCallState) -> None:
            if state.outcome is not None:
                log.warning("the engine failed, trying again", error=str(state.outcome.exception()))

        return await AsyncRetrying(
            retry=retry_if_exception(may_pass),
            stop=stop_after_delay(self._config.start_timeout_s) | stop_when_event_set(self._hurry),
            wait=wait_exponential(multiplier=0.2, max=3.0) + wait_random(0, 0.3),
            before_sleep=report,
            reraise=True,
        )(attempt, task)

    async def _start(self, task: Task) -> RunnerSandbox:
        await self._images.make_room()
        name = f"agent-r3-{uuid.uuid4().hex[:16]}"
        what = f"container {name} of {task.image}"
        channel: Channel | None = None
        image = await self._images.require(task)
        async with self._starting:
            try:
                try:
                    sock = await self._attached(name, task, image)
                except _ImageGoneError:
                    self._images.lost(task.image)
                    sock = await self._attached(name, task, await self._images.require(task))
                channel = await Channel.over_attached(sock, what)
                await channel.ready(self._config.start_timeout_s)
            except BaseException as exc:
                if channel is not None:
                    channel.close()
                self._removals.remove(name, force=True, late=outcome_unknown(exc))
                if isinstance(exc, SandboxDeadError) and UNUSABLE in str(exc):
                    reason = str(exc).partition(UNUSABLE)[2].strip()
                    raise DataError(f"image {task.image} of task {task.id} cannot be used: {reason}") from exc
                raise
        return RunnerSandbox(name, task, channel, lambda sandbox: self._removals.remove(name, force=sandbox.silent))

    async def _attached(self, name: str, task: Task, image: str) -> socket.socket:
        with engine_boundary(f"start container {name} of {task.image}"):
            return await self._threads.call(self._create, name, task, image)

    def _create(self, name: str, task: Task, image: str) -> socket.socket:
        """Blocks. A started container and its stream."""
        config = self._config
        host_config = self._api.create_host_config(
            network_mode="default" if task.network else "none",
            mem_limit=self._sizes.memory,
            memswap_limit=self._sizes.memory,
            nano_cpus=round(config.cpus * 1e9),
            pids_limit=config.pids,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            log_config=LogConfig(type="none", config={}),
            ulimits=[
                Ulimit(name="fsize", soft=self._sizes.file_size, hard=self._sizes.file_size),
                Ulimit(name="core", soft=0, hard=0),
            ],
            auto_remove=True,
        )
        try:
            self._api.create_container(
                image,
                command=[RUNNER],
                entrypoint=["/bin/sh", "-c", LAUNCH],
                name=name,
                working_dir="/",
                stdin_open=True,
                tty=False,
                # The same isolation as network "none", without the call back into the daemon that costs as much as
                # all the rest of a start.
                network_disabled=not task.network,
                labels={**self._labels, DEADLINE_LABEL: str(int(time.time()) + _LIFETIME_S)},
                host_config=host_config,
                stop_signal="SIGKILL",  # PID 1 ignores SIGTERM, and a stopping daemon would wait 10 s for it
            )
        except NotFound as exc:
            raise _ImageGoneError from exc
        try:
            attached = self._api.attach_socket(name, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            sock = _own_socket(attached)
        except NotFound as exc:
            raise SandboxDeadError(f"container {name} of {task.image} is gone before it was started") from exc
        try:
            self._api.start(name)
        except BaseException as exc:
            sock.close()
            raise self._start_failure(exc, name, task) from exc
        return sock

    def _start_failure(self, exc: BaseException, name: str, task: Task) -> BaseException:
        if isinstance(exc, NotFound):
            return SandboxDeadError(f"container {name} of {task.image} is gone before it was started")
        if isinstance(exc, APIError) and 'exec: "/bin/sh"' in str(exc):
            return DataError(f"image {task.image} of task {task.id} cannot be used: it has no /bin/sh that runs")
        return exc

    def _check_network(self, task: Task) -> None:
        if task.network and not self._config.network:
            raise DataError(f"task {task.id} asks for a network; set sandbox.network to true to give it one")

    async def maintain(self, sandboxes: Collection[RunnerSandbox], planned: Collection[Task]) -> None:
        """See the protocol."""
        self._images.plan(planned)
        self._removals.again()
        try:
            await self._watch_sizes(sandboxes)
            await self._threads.call(remove_left_over, self._api, None)
            await self._images.make_room()
        except SandboxError as exc:
            log.warning("the watch over sandboxes failed", error=str(exc))

    async def _watch_sizes(self, sandboxes: Collection[RunnerSandbox]) -> None:
        if not sandboxes:
            return
        own = {"label": f"{OWNER_LABEL}={self._labels[OWNER_LABEL]}"}
        with engine_boundary("look at the containers' sizes"):
            found = await self._threads.call(self._api.containers, filters=own, size=True)
        sizes = {name.lstrip("/"): container.get("SizeRw", 0) for container in found for name in container["Names"]}
        for sandbox in sandboxes:
            if (size := sizes.get(sandbox.id, 0)) > self._sizes.disk:
                fate = f"{sandbox.id} of task {sandbox.task.id} wrote {size >> 20} MiB"
                log.warning("a sandbox outgrew its disk", sandbox=sandbox.id, task=sandbox.task.id, mib=size >> 20)
                sandbox.end(DiskFullError(f"{fate}; sandbox.disk is {self._config.disk}"))

    def hurry(self) -> None:
        """See the protocol."""
        self._hurry.set()
        self._images.give_up()

    async def close(self) -> None:
        """Wait, within limits, for the removals, remove what others left, and end the threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._removals.finish()
        try:
            await self._threads.call(remove_left_over, self._api, None)
        except FAULTS as exc:
            log.warning("left-over containers not removed", error=str(exc))
        self._images.close()
        self._threads.close()
        self._api.close()


def _own_socket(attached: Any) -> socket.socket:
    """A socket of ours for the hijacked connection; the SDK's HTTP response is closed, or its descriptor would stay."""
    try:
        return socket.socket(fileno=os.dup(attached.fileno()))
    finally:
        attached._response.close()

"""bwrap as a host of sandboxes: the image's tree under a writable overlay, our runner as PID 1, no daemon at all.

A sandbox lives as long as its socket and no longer than this process: the runner exits at the end of its input, and
the kernel kills bwrap, and with it every process of the sandbox, when the process that started it dies.
"""

import asyncio
import errno
import os
import platform
import re
import socket
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from agent_r3.config import SandboxConfig
from agent_r3.envs import scratch as places
from agent_r3.envs.bwrap import Rlimits, command, launch_environment, require_bwrap
from agent_r3.envs.cgroups import Limits, Parent, make_groups, remove_groups, writable_parents
from agent_r3.envs.channel import Channel
from agent_r3.envs.launch import UNUSABLE
from agent_r3.envs.owners import owner_label
from agent_r3.envs.rootfs import Rootfs, RootfsStore
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.envs.scratch import Scratch, make_scratch
from agent_r3.envs.seccomp import deny_filter
from agent_r3.envs.sizes import Sizes
from agent_r3.errors import DataError, DiskFullError, SandboxDeadError, SandboxError
from agent_r3.types import Task

log = structlog.get_logger(__name__)

_GONE_S = 5.0  # a sandbox whose socket was closed and that has not ended by then is killed
_OWN_PROCESS_COUNT = (5, 14)  # kernel from which a user namespace counts its processes for itself


@dataclass(slots=True)
class _Running:
    sandbox: RunnerSandbox
    scratch: Scratch


class BwrapHost:
    """Starts and removes sandboxes of one run. `overlay=False` copies the image for each, as where it is refused."""

    def __init__(self, config: SandboxConfig, run: str, owner: str, *, overlay: bool = True) -> None:
        require_bwrap()
        self._config = config
        self._run, self._owner = run, owner_label(owner)
        self._overlay = overlay
        self._store = RootfsStore(config.rootfs)
        self._root = places.scratch_root()
        self._sizes = Sizes.of(config)
        self._parents = writable_parents()
        self._rlimits = stand_ins(config, self._parents)
        self._filter = deny_filter()
        self._starting = asyncio.Semaphore(config.max_starting)
        self._running: dict[str, _Running] = {}
        self._removals: set[asyncio.Task[None]] = set()

    async def require_image(self, task: Task) -> None:
        """Raises DataError when the task's image is not unpacked, or the task wants what bwrap cannot give."""
        require_unpacked(self._store, task)

    async def start(self, task: Task) -> RunnerSandbox:
        """See the protocol."""
        image = require_unpacked(self._store, task)
        name = f"agent-r3-{uuid.uuid4().hex[:16]}"
        async with self._starting:
            self._require_space()
            with _as_sandbox_error(f"start sandbox {name} of {task.image}"):
                scratch = self._place(name)
            try:
                with _as_sandbox_error(f"start sandbox {name} of {task.image}"):
                    process, channel = await self._launch(name, image, scratch)
            except BaseException:
                self._see_off(None, scratch, patient=False)
                raise
            try:
                await channel.ready(self._config.start_timeout_s)
            except BaseException as exc:
                channel.close()
                self._see_off(process, scratch, patient=False)
                if isinstance(exc, SandboxDeadError) and (reason := _unusable(str(exc))):
                    raise DataError(f"image {task.image} of task {task.id} cannot be used: {reason}") from exc
                raise
        sandbox = RunnerSandbox(name, task, channel, lambda ended: self._ended(ended, process))
        self._running[name] = _Running(sandbox, scratch)
        return sandbox

    def _require_space(self) -> None:
        free, floor = places.free_bytes(self._root), self._sizes.disk_floor
        if free < floor:
            raise DiskFullError(f"{free} bytes are free at {self._root}, below sandbox.disk_floor ({floor})")

    def _place(self, name: str) -> Scratch:
        config = self._config
        # bwrap's own process, which waits outside, is one more.
        limits = Limits(self._sizes.memory, config.pids + 1, config.cpus)
        groups = make_groups(self._parents, name, limits)
        try:
            return make_scratch(self._root, name, self._run, self._owner, groups)
        except OSError:
            remove_groups(groups)
            raise

    async def _launch(self, name: str, image: Rootfs, scratch: Scratch) -> tuple[asyncio.subprocess.Process, Channel]:
        ours, theirs = socket.socketpair()
        filter_fd = _pipe_holding(self._filter) if self._filter else None
        arguments = command(
            scratch.folder, name, self._rlimits, image.environment, overlay=self._overlay, filter_fd=filter_fd
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=asyncio.subprocess.PIPE,
                cwd=image.folder,
                env=launch_environment(scratch.groups),
                pass_fds=() if filter_fd is None else (filter_fd,),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if filter_fd is not None:
                os.close(filter_fd)
        assert process.stderr is not None
        return process, await Channel.over_pipes(ours, process.stderr, f"sandbox {name} of {image.image}")

    def _ended(self, sandbox: RunnerSandbox, process: asyncio.subprocess.Process) -> None:
        running = self._running.pop(sandbox.id)
        self._see_off(process, running.scratch, patient=not sandbox.silent)

    def _see_off(self, process: asyncio.subprocess.Process | None, scratch: Scratch, *, patient: bool) -> None:
        """Remove a sandbox in the background; `close` waits for it."""
        removal = asyncio.create_task(_remove(process, scratch, _GONE_S if patient else 0.0))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def maintain(self, sandboxes: Collection[RunnerSandbox], planned: Collection[Task]) -> None:
        """End sandboxes that wrote more than `sandbox.disk`; remove what ended processes of any run left here."""
        most = self._sizes.disk
        running = [self._running[sandbox.id] for sandbox in sandboxes if sandbox.id in self._running]
        try:
            sizes = await places.bytes_written([each.scratch.folder for each in running])
            await asyncio.to_thread(places.reap, None)
        except (OSError, SandboxError) as exc:
            log.warning("sandboxes not looked after", error=str(exc))
            return
        for each in running:
            size = sizes.get(each.scratch.folder, 0)
            if size > most:
                fate = f"{each.sandbox.id} of task {each.sandbox.task.id} wrote {size >> 20} MiB"
                log.warning("a sandbox outgrew its disk", sandbox=each.sandbox.id, mib=size >> 20)
                each.sandbox.end(DiskFullError(f"{fate}; sandbox.disk is {self._config.disk}"))

    def hurry(self) -> None:
        """See the protocol; nothing is waited for here."""

    async def close(self) -> None:
        """Wait for the removals."""
        while self._removals:
            await asyncio.wait(self._removals)


def require_unpacked(store: RootfsStore, task: Task) -> Rootfs:
    """The task's image. Raises DataError in one line that says what to do."""
    if task.network:
        raise DataError(f"task {task.id} asks for a network, which bwrap sandboxes do not have; run it with Docker")
    return store.require(task)


def stand_ins(config: SandboxConfig, parents: list[Parent]) -> Rlimits:
    """Limits of each process, in place of the control groups that cannot be made."""
    controlled = {name for parent in parents for name in parent.controllers}
    version = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    sizes = Sizes.of(config)
    return Rlimits(
        file_size=sizes.file_size,
        processes=None if "pids" in controlled or version < _OWN_PROCESS_COUNT else config.pids,
        data=None if "memory" in controlled else sizes.memory,
    )


def limits_found() -> str:
    """In words, for `agent-r3 doctor`: how sandboxes are bounded on this machine."""
    controlled = {name for parent in writable_parents() for name in parent.controllers}
    rlimits = stand_ins(SandboxConfig(), writable_parents())
    memory = "cgroup" if "memory" in controlled else "rlimit of each process"
    pids = "cgroup" if "pids" in controlled else "rlimit" if rlimits.processes else "not bounded (kernel before 5.14)"
    cpus = "cgroup" if "cpu" in controlled else "not bounded"
    calls = "" if deny_filter() else f"; no system call filter for {platform.machine()}"
    return f"memory: {memory}; processes: {pids}; cpus: {cpus}{calls}"


async def _remove(process: asyncio.subprocess.Process | None, scratch: Scratch, patience_s: float) -> None:
    if process is not None:
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
    await scratch.remove()


@contextmanager
def _as_sandbox_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        kind = DiskFullError if exc.errno in (errno.ENOSPC, errno.EDQUOT) else SandboxError
        raise kind(f"{what}: {exc}") from exc


def _unusable(death: str) -> str:
    """What is wrong with the image, if that is why a sandbox did not start."""
    if UNUSABLE in death:
        return death.partition(UNUSABLE)[2].strip()
    return "it has no /bin/sh that runs" if "execvp /bin/sh" in death else ""


def _pipe_holding(data: bytes) -> int:
    """The read end of a pipe from which `data` and then the end can be read."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return reading

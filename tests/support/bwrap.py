"""bwrap sandboxes: the awkward repository unpacked, what a run has left behind, and a user without privileges."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from agent_r3.config import SandboxConfig
from agent_r3.envs.bwrap_host import BwrapHost
from agent_r3.envs.cgroups import writable_parents
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.rootfs import RootfsStore
from agent_r3.envs.sandbox import Sandbox
from agent_r3.envs.scratch import reap, scratch_root

_PLAIN_USER = 54_321


@pytest.fixture(scope="session")
def unpacked_image(docker_engine: docker.APIClient, sandbox_image: str) -> str:
    """The image of the awkward repository, unpacked in the user's cache, so that only the first session pays."""
    RootfsStore(None).unpack_images(docker_engine, [sandbox_image])
    return sandbox_image


@pytest.fixture
def bwrap_run() -> Iterator[str]:
    """A run of its own; whatever the test does, no process, folder or control group of it may be left."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    left = left_of(name)
    for sandbox in left:
        _kill_all(sandbox)
    reap(name)
    assert not left, f"left over: {left}"


@pytest.fixture
async def bwrap_pool(bwrap_run: str, unpacked_image: str) -> AsyncIterator[SandboxPool]:
    config = SandboxConfig(kind="bwrap")
    async with SandboxPool(BwrapHost(config, bwrap_run, "test"), config) as pool:
        yield pool


def left_of(run: str) -> list[str]:
    """Names of sandboxes of a run that have a folder on this machine."""
    return [folder.parent.name for folder in scratch_root().glob("*/owner.json") if f'"{run}"' in folder.read_text()]


def groups_of(sandbox: str) -> list[Path]:
    return [parent.folder / sandbox for parent in writable_parents() if (parent.folder / sandbox).exists()]


def processes_of(sandbox: str) -> list[int]:
    """Pids outside of bwrap and of the sandbox's PID 1."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") + (entry / "environ").read_bytes().split(b"\0")
            if {sandbox.encode(), f"HOSTNAME={sandbox}".encode()} & set(words):
                found.append(int(entry.name))
    return found


def kill_bwrap(sandbox: Sandbox) -> None:
    """End a sandbox from outside."""
    _kill_all(sandbox.id)


def _kill_all(sandbox: str) -> None:
    for pid in processes_of(sandbox):
        with contextlib.suppress(ProcessLookupError):  # it went with one that was killed before
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that a user without privileges can reach, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_plain_user(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `body` as a user without privileges, in a forked child, and fail with its traceback if it fails.

    Only what is imported before can be used: this Python may be where that user cannot read.
    """
    if os.geteuid() != 0:
        asyncio.run(body())
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        words = ""
        try:
            os.setgroups([])
            os.setresgid(_PLAIN_USER, _PLAIN_USER, _PLAIN_USER)
            os.setresuid(_PLAIN_USER, _PLAIN_USER, _PLAIN_USER)
            asyncio.run(body())
            scratch_root().rmdir()  # fails when anything is left in it
        except BaseException:  # noqa: BLE001  (the parent raises it)
            words = traceback.format_exc()
        os.write(writing, words.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        words = stream.read()
    os.waitpid(child, 0)
    assert not words, words

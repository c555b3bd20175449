"""Every backend behind the sandbox protocol, for the one suite that all of them must pass."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import docker
import pytest

from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.backend import open_backend
from agent_r3.envs.local import open_pool
from agent_r3.envs.sandbox import Sandbox, SandboxProvider
from agent_r3.types import Task
from tests.support.broker import broker_at
from tests.support.bwrap import kill_bwrap
from tests.support.docker import make_task


@dataclass(frozen=True, slots=True)
class ProtocolBackend:
    """What the suite needs of a backend: sandboxes of the awkward repository of tests/support/docker.py."""

    provider: SandboxProvider
    task: Task
    kill: Callable[[Sandbox], None]  # ends the sandbox from outside, as the kernel or an administrator would
    protected: bool = True  # what `Sandbox.protected` must say


@asynccontextmanager
async def _docker(request: pytest.FixtureRequest) -> AsyncIterator[ProtocolBackend]:
    engine: docker.APIClient = request.getfixturevalue("docker_engine")
    async with open_pool(SandboxConfig(kind="docker"), run=request.getfixturevalue("run_name")) as pool:
        yield ProtocolBackend(pool, request.getfixturevalue("sandbox_task"), lambda sandbox: engine.kill(sandbox.id))


@asynccontextmanager
async def _broker(request: pytest.FixtureRequest) -> AsyncIterator[ProtocolBackend]:
    """Docker behind a broker on a unix socket, in this process."""
    engine: docker.APIClient = request.getfixturevalue("docker_engine")
    task: Task = request.getfixturevalue("sandbox_task")
    config = SandboxConfig(broker=f"unix://{request.getfixturevalue('tmp_path')}/broker.sock")
    docker_only, run = SandboxConfig(kind="docker"), request.getfixturevalue("run_name")
    async with (
        open_backend(docker_only, GradingConfig(), run=run, owner="test") as behind,
        broker_at(config, behind, [task]),
        open_backend(config, GradingConfig(), run="test", owner="client") as (provider, _),
    ):
        yield ProtocolBackend(provider, task, lambda sandbox: engine.kill(sandbox.id))


@asynccontextmanager
async def _bwrap(request: pytest.FixtureRequest) -> AsyncIterator[ProtocolBackend]:
    """No engine at all, but for making the image that is unpacked."""
    request.getfixturevalue("unpacked_image")
    config = SandboxConfig(kind="bwrap")
    async with open_pool(config, run=request.getfixturevalue("bwrap_run")) as pool:
        yield ProtocolBackend(pool, request.getfixturevalue("sandbox_task"), kill_bwrap)


@asynccontextmanager
async def _docker_without_python(request: pytest.FixtureRequest) -> AsyncIterator[ProtocolBackend]:
    """PID 1 is the runner in bash."""
    engine: docker.APIClient = request.getfixturevalue("docker_engine")
    task = make_task(request.getfixturevalue("image_without_python"))
    async with open_pool(SandboxConfig(kind="docker"), run=request.getfixturevalue("run_name")) as pool:
        yield ProtocolBackend(pool, task, lambda sandbox: engine.kill(sandbox.id), protected=False)


Factory = Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[ProtocolBackend]]

# One entry a backend, with the marks of what it needs. A factory may ask `request` for any fixture that is not async.
BACKENDS: dict[str, tuple[Factory, tuple[pytest.MarkDecorator, ...]]] = {
    "docker": (_docker, (pytest.mark.docker,)),
    "docker-bash": (_docker_without_python, (pytest.mark.docker,)),
    "broker": (_broker, (pytest.mark.docker,)),
    "bwrap": (_bwrap, (pytest.mark.docker,)),
}


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, (_, marks) in BACKENDS.items()])
async def protocol_backend(request: pytest.FixtureRequest) -> AsyncIterator[ProtocolBackend]:
    factory, _ = BACKENDS[request.param]
    async with factory(request) as backend:
        yield backend

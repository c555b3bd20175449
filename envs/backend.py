"""Which sandboxes a config means: Docker, bwrap, or those of a broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.docker_host import DockerHost
from agent_r3.envs.grading import Grader
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.sandbox import Grading, SandboxProvider


class Backend(NamedTuple):
    """What an episode needs of this package."""

    provider: SandboxProvider
    grader: Grading


@asynccontextmanager
async def open_backend(
    sandbox: SandboxConfig, grading: GradingConfig, *, run: str, owner: str
) -> AsyncIterator[Backend]:
    """Sandboxes and grades, in this process or from the broker that the config names. Raises UserError at start."""
    async with open_pool(sandbox, run=run, owner=owner) as pool:
        yield Backend(pool, Grader(pool, grading))


def open_pool(config: SandboxConfig, *, run: str = "none", owner: str = "worker") -> SandboxPool:
    """A pool on this machine's own backend. Raises UserError where there is none.

    `run` and `owner` label what is started, so that it can be told apart and reaped.
    """
    return SandboxPool(DockerHost(config, run, owner), config)

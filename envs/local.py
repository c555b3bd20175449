"""Sandboxes of this machine: Docker or bwrap, whichever the config means.

What either needs is imported when it is used: roles behind a broker have no Docker SDK.
"""

from collections.abc import Sequence
from typing import Literal

from agent_r3.config import SandboxConfig
from agent_r3.envs import scratch
from agent_r3.envs.bwrap import bwrap_problem, require_bwrap
from agent_r3.envs.pool import SandboxPool
from agent_r3.errors import UserError
from agent_r3.types import Task


def open_pool(config: SandboxConfig, *, run: str = "none", owner: str = "worker") -> SandboxPool:
    """A pool on this machine's own backend. Raises UserError where there is none.

    `run` and `owner` label what is started, so that it can be told apart and reaped.
    """
    if local_kind(config) == "bwrap":
        from agent_r3.envs.bwrap_host import BwrapHost

        return SandboxPool(BwrapHost(config, run, owner), config)
    from agent_r3.envs.docker_host import DockerHost

    return SandboxPool(DockerHost(config, run, owner), config)


def local_kind(config: SandboxConfig) -> Literal["docker", "bwrap"]:
    """What runs sandboxes on this machine: `auto` is Docker where it answers, else bwrap where it works.

    Raises UserError in one line on how to get either.
    """
    if config.kind != "auto":
        return config.kind
    from agent_r3.envs import docker

    no_docker = docker.docker_problem()
    if no_docker is None:
        return "docker"
    no_bwrap = bwrap_problem()
    if no_bwrap is None:
        return "bwrap"
    raise UserError(f"nothing here can run sandboxes: {no_docker}; or {no_bwrap}")


def require_backend(config: SandboxConfig, tasks: Sequence[Task]) -> None:
    """Raises UserError where this machine's backend cannot be used or has not what must be here for `tasks`."""
    if local_kind(config) == "bwrap":
        from agent_r3.envs.bwrap_host import require_unpacked
        from agent_r3.envs.rootfs import RootfsStore

        require_bwrap()
        store = RootfsStore(config.rootfs)
        for task in tasks:
            require_unpacked(store, task)
        return
    from agent_r3.envs import docker
    from agent_r3.envs.images import require_images

    docker.require_docker()
    require_images(tasks)


def reap(config: SandboxConfig, run: str | None) -> int:
    """Remove what ended processes left of `run` (every run for None) on this machine; the number of sandboxes.

    What cannot be removed is logged.
    """
    removed = 0
    if config.kind != "bwrap":
        from agent_r3.envs import docker

        if config.kind == "docker" or docker.docker_problem() is None:
            removed += docker.reap(run)
    if config.kind != "docker":
        removed += scratch.reap(run)
    return removed

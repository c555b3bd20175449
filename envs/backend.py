"""Where an episode gets its sandboxes and grades: from this process, or from a broker."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.broker_client import BrokerClient, check_broker
from agent_r3.envs.sandbox import Grading, SandboxProvider
from agent_r3.types import Task


class Backend(NamedTuple):
    """What an episode needs of this package."""

    provider: SandboxProvider
    grader: Grading


@asynccontextmanager
async def open_backend(
    sandbox: SandboxConfig, grading: GradingConfig, *, run: str, owner: str
) -> AsyncIterator[Backend]:
    """Sandboxes and grades, in this process or from the broker that the config names. Raises UserError at start."""
    if sandbox.broker is not None:
        async with BrokerClient.of(sandbox, name=f"{run}/{owner}", grade_retries=grading.retries) as client:
            yield Backend(client, client)
        return
    # Not at the top: a worker behind a broker has no Docker SDK.
    from agent_r3.envs.grading import Grader
    from agent_r3.envs.local import open_pool

    async with open_pool(sandbox, run=run, owner=owner) as pool:
        yield Backend(pool, Grader(pool, grading))


def require_served(sandbox: SandboxConfig, tasks: Sequence[Task]) -> None:
    """Raises UserError for tasks that cannot be graded, or that neither this machine nor the broker can run."""
    from agent_r3.envs.grading import require_gradable

    for task in tasks:
        require_gradable(task)
    if sandbox.broker is not None:
        check_broker(sandbox, tasks)
        return
    from agent_r3.envs.local import require_backend

    require_backend(sandbox, tasks)

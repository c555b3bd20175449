"""`agent-r3 rollout`: one rollout worker."""

from pathlib import Path
from typing import Annotated

import typer


def rollout(
    config: Annotated[Path, typer.Argument(help="Config of the run; store.url and engine.urls must be set.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: rollout.concurrency=16.")] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of this worker, its host's by default; after a restart the same name goes on."),
    ] = None,
) -> None:
    """Run one rollout worker: claim groups from the store, run and grade their episodes, publish them.

    `agent-r3 train` starts as many as rollout.workers says; several on one host need names. SIGTERM makes it claim no
    more and publish what it holds within service.grace_s. /healthz and /metrics are on service.port.

    Example: agent-r3 rollout config.yaml store.url=redis://redis:6379 'engine.urls=[http://sglang:30000]'
    """
    import asyncio
    import socket

    from agent_r3.cli.roles import load_role_config
    from agent_r3.rollout.service import run_worker

    asyncio.run(run_worker(load_role_config(config, overrides), name or socket.gethostname()))

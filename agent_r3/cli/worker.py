"""`agent-r3 rollout`: one rollout worker."""

from pathlib import Path
from typing import Annotated

import typer


def rollout(
    config: Annotated[Path, typer.Argument(help="Resolved config of the run; store.url and engine.urls must be set.")],
    name: Annotated[str, typer.Option(help="Name of this worker; after a restart the same name goes on.")] = "worker-0",
) -> None:
    """Run one rollout worker: claim groups from the store, run and grade their episodes, publish them.

    `agent-r3 train` starts as many as rollout.workers says.

    Example: agent-r3 rollout runs/demo/resolved.yaml --name worker-0
    """
    import asyncio

    from agent_r3.config import load_config
    from agent_r3.rollout.service import run_worker

    asyncio.run(run_worker(load_config(config), name))

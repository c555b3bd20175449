"""`agent-r3 trainer`: one rank of the trainer."""

from pathlib import Path
from typing import Annotated

import typer


def trainer(
    config: Annotated[Path, typer.Argument(help="Resolved config of the run; store.url and engine.urls must be set.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's latest checkpoint.")] = False,
) -> None:
    """Run the trainer: read finished groups from the store, train, push the weights to the engines.

    One process is one rank; several ranks are started by torchrun. `agent-r3 train` starts what train.ranks says.
    SIGTERM ends it at the next step boundary with a checkpoint.

    Example: torchrun --nproc-per-node 2 -m agent_r3.cli trainer runs/demo/resolved.yaml --resume
    """
    from agent_r3.config import load_config
    from agent_r3.errors import ConfigError
    from agent_r3.metrics import setup_logging

    resolved = load_config(config)
    if resolved.store.url is None:
        raise ConfigError(f"{config}: store.url is not set; the trainer meets the rollout workers in that Redis")
    if not resolved.engine.urls:
        raise ConfigError(f"{config}: engine.urls is empty; the trainer pushes its weights to those servers")

    setup_logging()
    from agent_r3.trainer.loop import main

    main(resolved, resolved.store.url, resolved.engine.urls, resume=resume)

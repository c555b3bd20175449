"""`agent-r3 train`: the whole loop on one machine."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(help="YAML config, for instance configs/tiny-cpu.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: train.lr=1e-6 run.seed=1.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's latest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of this name first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> None:
    """Train: starts the store, the engine, the rollout workers and the trainer, and writes the report at the end.

    Everything lands in <run.dir>/<run.name>/: config.yaml, metrics.jsonl, tensorboard/, trajectories/, checkpoints/,
    logs/, summary.json and report.html. Ctrl-C stops and removes everything that was started.

    Example: agent-r3 train configs/tiny-cpu.yaml train.steps=5 run.name=try
    """
    from agent_r3.config import dump_config, load_config

    resolved = load_config(config, overrides or [])
    if dry_run:
        print(dump_config(resolved), end="")
        return
    import asyncio

    from agent_r3.supervise import supervise

    raise typer.Exit(asyncio.run(supervise(resolved, resume=resume, overwrite=overwrite)))

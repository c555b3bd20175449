"""`agent-r3 model`: models that this project makes itself."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Models made here.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `tiny` a subcommand while it is the only one."""


@app.command()
def tiny(
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: the cache, where configs find it.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Make it again although it is there.")] = False,
) -> None:
    """Make the tiny policy: a small MoE with its tokenizer, warmed up on scripted episodes in real containers.

    Needs the offline tasks it is warmed up on (`agent-r3 tasks build offline`). Takes minutes; done once.

    Example: agent-r3 model tiny
    """
    import asyncio
    import time

    from agent_r3.tiny import ensure_tiny

    began = time.monotonic()
    made, folder = asyncio.run(ensure_tiny(out, force=force))
    print(f"{folder}: made in {time.monotonic() - began:.0f} s" if made else f"{folder}: there already")

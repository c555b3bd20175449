"""`agent-r3 serve`: one inference engine in the foreground."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agent_r3.rollout.launcher import EngineServer


def serve(
    config: Annotated[Path, typer.Argument(help="YAML config; its sections `model` and `engine` are used.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: engine.port=30000.")] = None,
    weight_version: Annotated[int, typer.Option(help="Policy version of the weights in the model folder.")] = 0,
) -> None:
    """Serve the model with SGLang until SIGTERM or Ctrl-C. Prints the URL once it has answered with routing rows.

    Its log is <run.dir>/<run.name>/logs/engine.log.

    Example: agent-r3 serve configs/tiny-cpu.yaml engine.port=30000
    """
    import asyncio

    from agent_r3.config import load_config
    from agent_r3.hfconfig import read_model
    from agent_r3.process import until_signalled
    from agent_r3.rollout.launcher import EngineServer
    from agent_r3.tiny import model_folder

    resolved = load_config(config, overrides or [])
    server = EngineServer(
        resolved.engine,
        read_model(model_folder(resolved.model.path)),
        log=resolved.run.folder / "logs" / "engine.log",
        weight_version=weight_version,
        seed=resolved.run.seed,
    )
    asyncio.run(until_signalled(_serve(server)))


async def _serve(server: "EngineServer") -> None:
    async with server:
        print(f"serving at {server.url}", flush=True)
        await server.watch()

"""`agent-r3 serve`: one inference engine in the foreground."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[Path, typer.Argument(help="YAML config; its sections `model` and `engine` are used.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: engine.port=30000.")] = None,
    weight_version: Annotated[int, typer.Option(help="Policy version of the weights in model.path.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of this engine in the run; its host's by default.")] = None,
) -> None:
    """Serve the model with SGLang until SIGTERM or Ctrl-C. Prints the URL once it has answered with routing rows.

    With store.url it serves the policy that the run is at, so that an engine that is started again fits in, and
    model.path before there is one. Its log is <run.dir>/<run.name>/logs/engine.log. /healthz and /metrics are on
    service.port; SGLang's own metrics are on its port with engine.metrics=true.

    Example: agent-r3 serve configs/tiny-cpu.yaml engine.port=30000
    """
    import asyncio
    import socket

    from agent_r3.cli.roles import load_role_config
    from agent_r3.rollout.engine_service import serve_engine

    resolved = load_role_config(config, overrides)
    asyncio.run(serve_engine(resolved, name or socket.gethostname(), weight_version=weight_version))

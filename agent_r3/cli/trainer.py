"""`agent-r3 trainer`: one rank of the trainer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agent_r3.config import Config


def trainer(
    config: Annotated[Path, typer.Argument(help="Config of the run; store.url and engine.urls must be set.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: train.steps=5.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's latest checkpoint.")] = False,
    rejoin: Annotated[
        bool,
        typer.Option(
            "--rejoin",
            help="For a service: go on with the run where one has begun, else start it; keep its config.yaml and, at "
            "the end, its report. Ends at once when all its steps are made.",
        ),
    ] = False,
) -> None:
    """Run the trainer: read finished groups from the store, train, push the weights to the engines.

    One process is one rank; several ranks are started by torchrun. `agent-r3 train` starts what train.ranks says.
    SIGTERM ends it at the next step boundary with a checkpoint. /healthz and /metrics are on service.port of rank 0.

    Example: torchrun --nproc-per-node 2 -m agent_r3.cli trainer config.yaml --rejoin
    """
    from agent_r3.cli.roles import load_role_config
    from agent_r3.errors import ConfigError
    from agent_r3.store import connection_url

    resolved = load_role_config(config, overrides)
    if resolved.store.url is None:
        raise ConfigError(f"{config}: store.url is not set; the trainer meets the rollout workers in that Redis")
    if not resolved.engine.urls:
        raise ConfigError(f"{config}: engine.urls is empty; the trainer pushes its weights to those servers")
    url = connection_url(resolved.store)
    if rejoin:
        _rejoin(resolved, url)
        return
    from agent_r3.trainer.loop import main

    main(resolved, url, resolved.engine.urls, resume=resume)


def _rejoin(config: "Config", url: str) -> None:
    import os

    import structlog

    from agent_r3.config import dump_config
    from agent_r3.report import write_report
    from agent_r3.trainer.role import standing

    log = structlog.get_logger(__name__)
    leads = int(os.environ.get("RANK", "0")) == 0
    folder = config.run.folder
    found = standing(config)

    def finish() -> None:
        if standing(config) == "done":
            write_report(folder)
            log.info("the run has made all its steps", steps=config.train.steps, report=str(folder / "report.html"))

    if leads:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config))
    if found != "done":
        from agent_r3.trainer.loop import main

        main(config, url, config.engine.urls, resume=found == "going_on", finish=finish)
    elif leads:
        finish()

"""`agent-r3 broker`: sandboxes and grades for workers that have no Docker socket."""

from pathlib import Path
from typing import Annotated

import typer


def broker(
    config: Annotated[Path, typer.Argument(help="YAML config: its tasks, eval.tasks, sandbox and grading are served.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: sandbox.warm=8.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="unix:///PATH or http://HOST:PORT; by default the config's sandbox.broker.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token that clients must give; by default the config's sandbox.broker_token_file, "
            "then AGENT_R3_BROKER_TOKEN. A unix socket, which only its owner can open, works without one."
        ),
    ] = None,
    max_sandboxes: Annotated[int, typer.Option(min=1, help="Most open sandboxes of one client.")] = 256,
    max_gradings: Annotated[int, typer.Option(min=1, help="Most gradings of one client at the same time.")] = 64,
    max_starts_per_minute: Annotated[int, typer.Option(min=1, help="Most sandboxes given to one client a minute.")] = (
        1_200
    ),
    audit_log: Annotated[
        Path | None,
        typer.Option(help="File to which the audit log is appended, instead of stdout; SIGHUP opens it again."),
    ] = None,
) -> None:
    """Serve sandboxes and grades to rollout workers whose config names this broker in sandbox.broker.

    Clients may only name tasks of the config's datasets (`tasks` and `eval.tasks`). A client that goes loses all it
    had. Each operation, and each request that is refused, is one JSON line of the audit log. A client waits where it
    has too many gradings or starts, a client is who gives the same name. SIGTERM ends every sandbox. /healthz and
    /metrics are on service.port, /healthz on the broker's own address too.

    Example: agent-r3 broker configs/tiny-cpu.yaml --listen unix:///run/agent-r3/broker.sock
    """
    import asyncio

    from agent_r3.config import load_config
    from agent_r3.envs.broker import run_broker
    from agent_r3.envs.broker_audit import open_audit_log
    from agent_r3.envs.broker_quotas import Quotas
    from agent_r3.envs.broker_wire import parse_address, read_token
    from agent_r3.errors import ConfigError
    from agent_r3.metrics import setup_logging

    setup_logging()
    resolved = load_config(config, overrides or [])
    where = listen or resolved.sandbox.broker
    if where is None:
        raise ConfigError("give the broker an address: --listen unix:///PATH, or sandbox.broker in its config")
    address = parse_address(where, "--listen" if listen else "sandbox.broker")
    token = read_token(token_file or resolved.sandbox.broker_token_file)
    quotas = Quotas(max_sandboxes, max_gradings, max_starts_per_minute)
    with open_audit_log(audit_log) as audit_file:
        asyncio.run(run_broker(resolved, address, token, quotas=quotas, audit_file=audit_file))

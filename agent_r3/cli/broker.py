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
    audit_log: Annotated[
        Path | None, typer.Option(help="File to which the audit log is appended, instead of stdout.")
    ] = None,
) -> None:
    """Serve sandboxes and grades to rollout workers whose config names this broker in sandbox.broker.

    Clients may only name tasks of the config's datasets (`tasks` and `eval.tasks`). A client that goes loses all it
    had. Each operation is one JSON line of the audit log; SIGTERM ends every sandbox.

    Example: agent-r3 broker configs/tiny-cpu.yaml --listen unix:///run/agent-r3/broker.sock
    """
    import asyncio

    from agent_r3.config import load_config
    from agent_r3.envs.broker import open_audit_log, run_broker
    from agent_r3.envs.broker_wire import parse_address, read_token
    from agent_r3.errors import ConfigError

    resolved = load_config(config, overrides or [])
    where = listen or resolved.sandbox.broker
    if where is None:
        raise ConfigError("give the broker an address: --listen unix:///PATH, or sandbox.broker in its config")
    address = parse_address(where, "--listen" if listen else "sandbox.broker")
    token = read_token(token_file or resolved.sandbox.broker_token_file)
    with open_audit_log(audit_log) as audit:
        asyncio.run(run_broker(resolved, address, token, max_sandboxes=max_sandboxes, audit=audit))

"""The `agent-r3` command: its commands put together, and how it fails."""

import sys

import typer

from agent_r3.cli import bench, broker, doctor, evaluate, model, runs, serve, status, tasks, train, trainer, worker
from agent_r3.errors import AgentR3Error, UserError

_ROLES = "Roles, each a process of its own"

app = typer.Typer(
    name="agent-r3",
    help="Train coding agents on MoE models with GRPO and rollout routing replay (R3).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("doctor")(doctor.doctor)
app.command("train")(train.train)
app.command("status", cls=status.Command)(status.status)
app.command("report")(runs.report)
app.add_typer(evaluate.app, name="eval")
app.add_typer(tasks.app, name="tasks")
app.add_typer(model.app, name="model")
app.add_typer(runs.trajectory_app, name="trajectory")
app.add_typer(bench.app, name="bench")
app.command("serve", rich_help_panel=_ROLES)(serve.serve)
app.command("broker", rich_help_panel=_ROLES)(broker.broker)
app.command("rollout", rich_help_panel=_ROLES)(worker.rollout)
app.command("trainer", rich_help_panel=_ROLES)(trainer.trainer)


def main() -> None:
    """Entry point: what the user can mend is one line and exit code 2; our own other errors are one line and 1."""
    try:
        app()
    except UserError as exc:
        print(f"agent-r3: {exc}", file=sys.stderr)
        sys.exit(2)
    except AgentR3Error as exc:
        print(f"agent-r3: {type(exc).__name__}: {exc}", file=sys.stderr)
        sys.exit(1)

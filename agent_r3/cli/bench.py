"""`agent-r3 bench`: ratios to a named baseline, measured in the same run."""

from typing import Annotated

import typer

app = typer.Typer(help="Benchmarks: ratios to a baseline of the same run.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


@app.callback()
def _group() -> None:
    """Keeps `r3` a subcommand while it is the only one."""


@app.command()
def r3(
    pairs: Annotated[int, typer.Option(min=2, help="Paired runs, on and off in alternating order.")] = 8,
    as_json: AsJson = False,
) -> None:
    """What recording routing rows costs: R3 on against off, CPU seconds a trajectory, on the tiny policy.

    Example: agent-r3 bench r3 --pairs 8 --json
    """
    from agent_r3.tiny import model_folder

    arguments = ["--model", str(model_folder("tiny")), "--pairs", str(pairs)]
    _run("r3_overhead.py", [*arguments, *(["--json"] if as_json else [])])


def _run(script: str, args: list[str]) -> None:
    """Run a script of the checkout's benchmarks/ in a process of its own."""
    import subprocess
    import sys
    from pathlib import Path

    import agent_r3
    from agent_r3.errors import UserError

    path = Path(agent_r3.__file__).resolve().parent.parent / "benchmarks" / script
    if not path.is_file():
        raise UserError(f"benchmark {path} is not there: benchmarks come with the source checkout, not with the wheel")
    raise typer.Exit(subprocess.run([sys.executable, str(path), *args], check=False).returncode)

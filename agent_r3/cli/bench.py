"""`agent-r3 bench`: ratios to a named baseline, measured in the same run."""

from typing import Annotated

import typer

app = typer.Typer(help="Benchmarks: ratios to a baseline of the same run.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


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
    _run("r3_overhead", [*arguments, *(["--json"] if as_json else [])])


@app.command()
def sandbox(
    quick: Annotated[bool, typer.Option("--quick", help="Does it work: few repetitions, 8 containers for 32.")] = False,
    as_json: AsJson = False,
) -> None:
    """Sandboxes against the Docker SDK, mini-swe-agent and SWE-ReX: commands, starts, memory, grading. Under 5 minutes.

    The two are installed from PyPI into an environment of their own in the cache.

    Example: agent-r3 bench sandbox --json
    """
    _run("sandbox", [*(["--quick"] if quick else []), *(["--json"] if as_json else [])])


@app.command("eval")
def eval_(
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each of 8 tasks.")] = 16,
    as_json: AsJson = False,
) -> None:
    """What an evaluation costs besides model, commands and tests: scripted agents, 16 workers, stages timed. 3 minutes.

    Example: agent-r3 bench eval --json
    """
    _run("evaluation", ["--samples", str(samples), *(["--json"] if as_json else [])])


def _run(module: str, args: list[str]) -> None:
    """Run a module of the checkout's benchmarks/ in a process of its own."""
    import os
    import subprocess
    import sys
    from pathlib import Path

    import agent_r3
    from agent_r3.errors import UserError

    checkout = Path(agent_r3.__file__).resolve().parent.parent
    path = checkout / "benchmarks" / f"{module}.py"
    if not path.is_file():
        raise UserError(f"benchmark {path} is not there: benchmarks come with the source checkout, not with the wheel")
    paths = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", f"benchmarks.{module}", *args]
    raise typer.Exit(subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode)

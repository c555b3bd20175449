"""`agent-r3 report` and `agent-r3 trajectory`: what a run left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agent_r3.archive import TurnText

RunFolder = Annotated[Path, typer.Argument(help="The run's folder, for instance runs/demo.")]
AnyFolder = Annotated[Path, typer.Argument(help="Folder of a run or an evaluation, for instance runs/demo.")]
EpisodeId = Annotated[str, typer.Argument(help="Episode id as `trajectory list` shows it.")]

trajectory_app = typer.Typer(help="Finished episodes of a run or an evaluation.", no_args_is_help=True)


def report(run: RunFolder) -> None:
    """Write summary.json and report.html of a run anew, also while it is going on, and print the table.

    Example: agent-r3 report runs/demo
    """
    from agent_r3.report import print_table, write_report

    print_table(write_report(run))
    print(f"report: {run / 'report.html'}")


@trajectory_app.command("list")
def list_(
    run: AnyFolder,
    step: Annotated[int | None, typer.Option(help="Only this training step.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the archived episodes: step, task, reward (none before grading), turns, tokens, ending.

    Example: agent-r3 trajectory list runs/demo --step 3
    """
    import json

    from rich.console import Console
    from rich.table import Table

    from agent_r3.archive import episode_step, list_episodes, read_info

    paths = [path for path in list_episodes(run) if step is None or episode_step(path) == step]
    names = ("step", "id", "task", "reward", "turns", "tokens", "ending")
    rows: list[tuple[object, ...]] = []
    for path in paths:
        info = read_info(path)
        row = (info.id, info.task_id, info.reward, len(info.turns), info.tokens, info.ending.value)
        rows.append((episode_step(path), *row))
    if json_lines:
        for values in rows:
            print(json.dumps(dict(zip(names, values, strict=True))))
        return
    table = Table(*names, title=f"{len(rows)} episodes of {run}")
    for values in rows:
        table.add_row(*("-" if value is None else str(value) for value in values))
    Console().print(table)


@trajectory_app.command("export")
def export(
    run: RunFolder,
    episode: EpisodeId,
    out: Annotated[Path | None, typer.Option(help="File to write; standard output without it.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Include the routing rows, not only their shape.")] = False,
) -> None:
    """Export one episode as JSON: token ids, loss mask, log-probs, versions, shape of its routing rows, turns.

    The episode is checked first: T-1 rows, turns that join to exactly its tokens, loss on sampled tokens only.

    Example: agent-r3 trajectory export runs/demo g000003-01 --out episode.json
    """
    import json

    from agent_r3.archive import export as export_episode
    from agent_r3.archive import find_episode
    from agent_r3.errors import UserError, boundary

    text = json.dumps(export_episode(find_episode(run, episode), rows=rows))
    if out is None:
        print(text)
        return
    with boundary(UserError, f"write {out}", OSError):
        out.write_text(text + "\n")


@trajectory_app.command("show")
def show(run: AnyFolder, episode: EpisodeId) -> None:
    """Show one episode turn by turn: what the policy wrote and what it saw.

    Example: agent-r3 trajectory show runs/demo g000003-01
    """
    from rich.console import Console
    from rich.text import Text

    from agent_r3.archive import episode_step, find_episode, read_info

    path = find_episode(run, episode)
    info = read_info(path)
    console = Console()
    console.rule(f"{info.id} · step {episode_step(path)} · {info.task_id}")
    for turn in info.turns:
        _show_turn(console.print, turn)
    reward = "not graded yet" if info.reward is None else f"reward {info.reward:g}"
    console.rule(f"{reward} · ended by {info.ending} · {info.tokens} tokens")
    if info.reason:
        console.print(Text(info.reason))
    if info.patch.strip():
        console.print(Text(info.patch, style="dim"))


def _show_turn(show: Callable[[object], None], turn: "TurnText") -> None:
    from rich.panel import Panel
    from rich.text import Text

    title = f"turn {turn.index + 1}: {turn.prompt} new, {turn.sampled} sampled, {turn.cached_tokens} cached"
    # Text, not markup: what a model wrote may contain brackets.
    show(Panel(Text(turn.text), title=title, border_style="blue"))
    for observation in turn.observations:
        show(Panel(Text(observation.text), title="saw", border_style="red" if observation.is_error else "dim"))

"""`agent-r3 eval`: how good an agent is, by the official harness."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from agent_r3.config import Config


class _RunByDefault(TyperGroup):
    """`agent-r3 eval CONFIG` is `agent-r3 eval run CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="Evaluate an agent: Pass@1 on SWE-bench Verified, R2E-Gym or offline tasks. `agent-r3 eval CONFIG` runs one.",
    no_args_is_help=True,
)

_DATASET = "SWE-bench/SWE-bench_Verified"
Overrides = Annotated[list[str] | None, typer.Argument(help="Dotted overrides: eval.samples=4 sandbox.memory=4g.")]
Dataset = Annotated[
    str, typer.Option(help="`offline`, a .parquet/.json/.jsonl file, a folder of Harbor tasks, or a hub id.")
]
Split = Annotated[str, typer.Option(help="Split of a hub dataset.")]
Workers = Annotated[int, typer.Option(min=1, help="Gradings at the same time.")]
Evaluation = Annotated[Path, typer.Argument(help="Folder of an evaluation.")]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML config; a training config will do.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default <run.dir>/eval-<run.name>.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> None:
    """Run the training episode loop over a dataset, have every patch graded, and write the report.

    The model is `model.path` behind SGLang, which is started unless engine.urls names servers, or whatever
    eval.endpoint serves. Run again, it goes on where it stopped: nothing is sampled or graded twice, failures of the
    infrastructure are tried again, and a larger eval.samples adds samples.

    Example: agent-r3 eval configs/tiny-cpu.yaml eval.samples=4 --out runs/before
    """
    from agent_r3.config import dump_config, load_config

    resolved = load_config(config, overrides or [])
    if dry_run:
        print(dump_config(resolved), end="")
        return
    import asyncio

    from agent_r3.cli.roles import with_model_folder
    from agent_r3.eval.run import evaluate
    from agent_r3.metrics import setup_logging

    setup_logging()
    if resolved.eval.endpoint is None:
        resolved = with_model_folder(resolved)
    raise typer.Exit(asyncio.run(evaluate(resolved, out)))


@app.command()
def grade(
    predictions: Annotated[Path, typer.Argument(help="SWE-bench predictions, .json or .jsonl, of any agent.")],
    overrides: Overrides = None,
    dataset: Dataset = _DATASET,
    split: Split = "test",
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/eval-<name of the file>.")] = None,
    workers: Workers = 4,
) -> None:
    """Grade anyone's predictions with the official harness in our sandboxes, and write the report.

    Example: agent-r3 eval grade preds.json --dataset verified.parquet --workers 8
    """
    import asyncio

    from agent_r3.eval.grade_file import grade_file
    from agent_r3.metrics import setup_logging

    setup_logging()
    config = _config(dataset, split, overrides)
    raise typer.Exit(asyncio.run(grade_file(predictions, config, out or _default_out(predictions), at_once=workers)))


@app.command()
def gold(
    dataset: Annotated[str, typer.Argument(help="As for `grade --dataset`.")] = _DATASET,
    overrides: Overrides = None,
    split: Split = "test",
    out: Annotated[Path, typer.Option(help="Folder; `eval.gold` and `report --gold` take it.")] = Path(
        "runs/eval-gold"
    ),
    workers: Workers = 4,
) -> None:
    """Grade the gold patches: whatever fails with them here cannot be resolved by any agent here.

    Example: agent-r3 eval gold verified.parquet --out runs/gold
    """
    import asyncio

    from agent_r3.eval.grade_gold import grade_gold
    from agent_r3.metrics import setup_logging

    setup_logging()
    raise typer.Exit(asyncio.run(grade_gold(_config(dataset, split, overrides), out, at_once=workers)))


@app.command()
def report(
    folder: Evaluation,
    gold: Annotated[
        Path | None, typer.Option("--gold", help="Folder of `eval gold`; what fails there is left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json instead of the tables.")] = False,
) -> None:
    """Write report.json and report.html anew, also while the evaluation is going on, and print the tables.

    Example: agent-r3 eval report runs/eval-demo
    """
    from agent_r3.eval.report import print_report, write_report

    print_report(write_report(folder, gold=gold), folder, as_json=as_json)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Folder of the evaluation that is the baseline.")],
    b: Annotated[Path, typer.Argument(help="Folder of the one that is compared with it.")],
    out: Annotated[Path | None, typer.Option(help="HTML page to write; default <B>/compare.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the tables.")] = False,
) -> None:
    """The difference B - A on the instances of both, with its interval, and which instances changed.

    Example: agent-r3 eval compare runs/before runs/after
    """
    from agent_r3.eval.compare import print_comparison, write_comparison

    page = out or b / "compare.html"
    print_comparison(write_comparison(a, b, page), page, as_json=as_json)


def _default_out(predictions: Path) -> Path:
    return Path("runs") / f"eval-{predictions.stem}"


def _config(dataset: str, split: str, overrides: list[str] | None) -> "Config":
    from agent_r3.config import config_of

    tree = {"model": {"path": "none"}, "tasks": {"dataset": dataset, "split": split}}
    return config_of(tree, overrides or [], "the command line")

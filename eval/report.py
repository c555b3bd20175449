"""The report of an evaluation: report.json, report.html, and tables for the terminal."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r3.errors import DataError, UserError
from agent_r3.eval import wording
from agent_r3.eval.dataset import read_dataset
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.gold import gold_failures
from agent_r3.eval.summary import Part, Report, summarize
from agent_r3.journal import write_whole
from agent_r3.report import read_config

if TYPE_CHECKING:
    from rich.table import Table


def write_report(folder: Path, *, gold: Path | None = None) -> Report:
    """Write `report.json` and `report.html` into the evaluation's folder, also while it is going on.

    `gold` is a folder of `agent-r3 eval gold`; None takes eval.gold of the folder's config.yaml. Raises DataError where
    nothing is graded yet, UserError for a folder without an evaluation.
    """
    report, config = read_report(folder, gold=gold)
    page = _page(folder, config, report)
    write_whole(folder / "report.json", json.dumps(asdict(report), indent=1, allow_nan=False) + "\n")
    write_whole(folder / "report.html", page, errors="replace")
    return report


def read_report(folder: Path, *, gold: Path | None = None) -> tuple[Report, Mapping[str, Any]]:
    """The report on a folder, and its configuration; nothing is written."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not there; name the folder of an evaluation")
    config = read_config(folder)
    settings = config.get("eval") or {}
    gold = gold or (Path(settings["gold"]) if settings.get("gold") else None)
    dataset = (settings.get("tasks") or config.get("tasks") or {}).get("dataset", "?")
    failures = gold_failures(gold) if gold is not None else {}
    return summarize(EvaluationFolder(folder), str(dataset), read_dataset(folder), failures), config


def _page(folder: Path, config: Mapping[str, Any], report: Report) -> str:
    try:
        from agent_r3.eval.page import render  # draws with matplotlib
    except ImportError as exc:
        raise UserError("matplotlib is not installed; `pip install agent-r3[report]`") from exc
    return render(folder, config, report)


def print_report(report: Report, folder: Path, *, as_json: bool) -> None:
    """Tables on the terminal, or report.json as it is on disk."""
    if as_json:
        print(json.dumps(asdict(report), indent=1, allow_nan=False))
        return
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)  # names are no markup
    for table in _tables(report):
        console.print(table)
    for note in wording.notes(report):
        console.print(f"- {note}")
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)


def _tables(report: Report) -> "list[Table]":
    tables = [_main(report)]
    for heading, parts in (("repository", report.by_repo), ("difficulty", report.by_difficulty)):
        if len(parts) > 1:
            tables.append(_parts(heading, parts))
    if report.episodes:
        tables.append(_effort(report))
    return tables


def _main(report: Report) -> "Table":
    from rich.table import Table

    rate, n = report.pass_at_1, report.instances_in_dataset
    title = wording.printable(f"{', '.join(report.models)} on {report.dataset}")
    table = Table(title=title, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("Pass@1", f"{wording.percent(rate.mean)} ± {wording.error(rate)}")
    table.add_row("95% interval", wording.interval(rate))
    for estimate in report.pass_at_k[1:]:
        table.add_row(f"pass@{estimate.k}", f"{wording.percent(estimate.mean)} ({estimate.instances:,} instances)")
    table.add_row("instances graded", f"{report.instances_graded:,}" + (f" of {n:,}" if n is not None else ""))
    table.add_row("samples", f"{rate.samples:,}, up to {report.samples} an instance")
    table.add_section()
    for verdict, count in report.verdicts.items():
        table.add_row(wording.VERDICT_NAMES[verdict], f"{count:,}")
    infrastructure = report.infrastructure
    failures = f"{len(infrastructure.excluded):,} left out, {infrastructure.mended:,} mended by a retry"
    table.add_row("infrastructure", failures if infrastructure.failures else "no failure")
    if report.endings:
        table.add_section()
        for ending, count in report.endings.items():
            table.add_row(f"ended by {ending}", f"{count:,}")
    return table


def _parts(heading: str, parts: tuple[Part, ...]) -> "Table":
    from rich.table import Table

    table = Table(heading)
    for column in ("instances", "Pass@1", "standard error", "95% interval"):
        table.add_column(column, justify="right")
    for part in parts:
        rate = part.rate
        numbers = (f"{rate.instances:,}", wording.percent(rate.mean), wording.error(rate), wording.interval(rate))
        table.add_row(wording.printable(part.name), *numbers)
    return table


def _effort(report: Report) -> "Table":
    from rich.table import Table

    table = Table("an episode")
    for column in ("mean", "median", "90% are below"):
        table.add_column(column, justify="right")
    for name, spread in report.episodes.items():
        table.add_row(wording.EFFORT_NAMES[name], *wording.spread(spread))
    return table

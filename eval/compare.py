"""Two evaluations side by side: the paired difference B - A on the instances of both, and which instances changed."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from agent_r3.errors import DataError, UserError
from agent_r3.eval import wording
from agent_r3.eval.report import read_report
from agent_r3.eval.summary import EFFORT, Instance, Report
from agent_r3.journal import write_whole
from agent_r3.statistics import Difference, PassRate, paired_difference, pass_at_1

if TYPE_CHECKING:
    from rich.table import Table

_PRINTED = 20  # changed instances on the terminal


@dataclass(frozen=True, slots=True)
class Side:
    """One of the evaluations."""

    folder: str
    models: tuple[str, ...]
    dataset: str
    pass_at_1: PassRate  # over all its instances
    shared: PassRate  # over those that the other has too
    only: int  # instances that the other does not have
    infrastructure_excluded: int  # samples that the infrastructure kept from a verdict
    gold_excluded: int  # instances


@dataclass(frozen=True, slots=True)
class Change:
    """An instance whose mean over samples changed; with one sample each: resolved in one and not in the other."""

    id: str
    repo: str
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class Effort:
    """Means over episodes' means of shared instances, and their paired difference B - A."""

    a: float
    b: float
    difference: Difference


@dataclass(frozen=True, slots=True)
class Comparison:
    a: Side
    b: Side
    shared: int  # instances with a verdict in both
    difference: Difference  # of Pass@1
    gained: tuple[Change, ...]  # largest change first
    lost: tuple[Change, ...]
    by_repo: Mapping[str, Difference]
    effort: Mapping[str, Effort]  # turns, prompt_tokens, cached_tokens, sampled_tokens, seconds, where both have them
    pairs: tuple[tuple[float, float, int], ...]  # mean in A, mean in B, instances


def write_comparison(a: Path, b: Path, page: Path) -> Comparison:
    """Compare B with the baseline A; write the HTML page, and beside it the same name with `.json`.

    Raises DataError where the two have no graded instance in common.
    """
    comparison = compare((a, read_report(a)[0]), (b, read_report(b)[0]))
    try:
        from agent_r3.eval.compare_page import render  # draws with matplotlib
    except ImportError as exc:
        raise UserError("matplotlib is not installed; `pip install agent-r3[report]`") from exc

    rendered = render(comparison)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page.with_suffix(".json"), json.dumps(asdict(comparison), indent=1, allow_nan=False) + "\n")
    write_whole(page, rendered, errors="replace")
    return comparison


def compare(a: tuple[Path, Report], b: tuple[Path, Report]) -> Comparison:
    """The comparison of two reports on the instances that have a verdict in both. Raises DataError for none."""
    of_a, of_b = (_graded(report) for _, report in (a, b))
    shared = [name for name in of_a if name in of_b]
    if not shared:
        raise DataError(
            f"no graded instance is in both {a[0]} ({a[1].dataset}) and {b[0]} ({b[1].dataset}); nothing to compare"
        )
    before, after = [of_a[name] for name in shared], [of_b[name] for name in shared]
    changes = [Change(x.id, x.repo or y.repo, _rate(x), _rate(y)) for x, y in zip(before, after, strict=True)]
    changed = sorted(changes, key=lambda change: (-abs(change.b - change.a), change.id))
    return Comparison(
        a=_side(*a, before),
        b=_side(*b, after),
        shared=len(shared),
        difference=_difference(changes),
        gained=tuple(change for change in changed if change.b > change.a),
        lost=tuple(change for change in changed if change.b < change.a),
        by_repo=_by_repo(changes),
        effort=_effort(before, after),
        pairs=tuple((x, y, count) for (x, y), count in sorted(Counter((c.a, c.b) for c in changes).items())),
    )


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know before believing it."""
    told = []
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        if side.only:
            told.append(f"{wording.counted(side.only, 'instance')} only in {letter}, not compared.")
        if side.infrastructure_excluded:
            left_out = wording.counted(side.infrastructure_excluded, "sample")
            told.append(f"{left_out} of {letter} left out: the infrastructure failed, retries included.")
        if side.gold_excluded:
            left_out = wording.counted(side.gold_excluded, "instance")
            told.append(f"{left_out} of {letter} left out whose gold patch fails there.")
        if len(side.models) > 1:
            told.append(f"{letter} holds predictions of {len(side.models)} models together.")
    if comparison.a.dataset != comparison.b.dataset:
        told.append(f"The datasets have different names: {comparison.a.dataset}, {comparison.b.dataset}.")
    if comparison.difference.low is None:
        told.append("Every instance changed alike, so no interval can be told from them.")
    elif wording.is_few(comparison.shared):
        told.append(wording.few(comparison.shared))
    return [wording.printable(note) for note in told]


def print_comparison(comparison: Comparison, page: Path, *, as_json: bool) -> None:
    """Tables on the terminal, or the JSON as it is on disk."""
    if as_json:
        print(json.dumps(asdict(comparison), indent=1, allow_nan=False))
        return
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)  # names are no markup
    console.print(_main(comparison))
    for title, changes in (("resolved more often in B", comparison.gained), ("less often in B", comparison.lost)):
        if changes:
            console.print(_changes(title, changes))
    for note in notes(comparison):
        console.print(f"- {note}")
    console.print(f"page: {page}", soft_wrap=True)


def _graded(report: Report) -> dict[str, Instance]:
    return {instance.id: instance for instance in report.instances if instance.graded}


def _rate(instance: Instance) -> float:
    return fmean(float(sample.resolved) for sample in instance.graded)


def _side(folder: Path, report: Report, shared: Sequence[Instance]) -> Side:
    return Side(
        folder=str(folder),
        models=report.models,
        dataset=report.dataset,
        pass_at_1=report.pass_at_1,
        shared=pass_at_1([[float(sample.resolved) for sample in instance.graded] for instance in shared]),
        only=report.instances_graded - len(shared),
        infrastructure_excluded=len(report.infrastructure.excluded),
        gold_excluded=len(report.gold_excluded),
    )


def _difference(changes: Sequence[Change]) -> Difference:
    return paired_difference([change.a for change in changes], [change.b for change in changes])


def _by_repo(changes: Sequence[Change]) -> dict[str, Difference]:
    found: dict[str, list[Change]] = {}
    for change in changes:
        found.setdefault(change.repo or "unknown", []).append(change)
    return {repo: _difference(members) for repo, members in sorted(found.items(), key=lambda item: -len(item[1]))}


def _effort(before: Sequence[Instance], after: Sequence[Instance]) -> dict[str, Effort]:
    found = {}
    for name in EFFORT:
        pairs = [
            (x, y)
            for pair in zip(before, after, strict=True)
            for x, y in ((_mean(pair[0], name), _mean(pair[1], name)),)
            if x is not None and y is not None
        ]
        if pairs:
            a, b = ([pair[side] for pair in pairs] for side in (0, 1))
            found[name] = Effort(fmean(a), fmean(b), paired_difference(a, b))
    return found


def _mean(instance: Instance, name: str) -> float | None:
    values = [value for sample in instance.samples if (value := getattr(sample, name)) is not None]
    return fmean(values) if values else None


def _main(comparison: Comparison) -> "Table":
    from rich.table import Table

    def name(side: Side) -> str:
        return wording.printable(", ".join(side.models))

    a, b, difference = comparison.a, comparison.b, comparison.difference
    table = Table(title=f"{wording.counted(comparison.shared, 'instance')} of both")
    table.add_column("")
    for heading in (f"A\n{name(a)}", f"B\n{name(b)}", "B - A"):
        table.add_column(heading, justify="right")
    table.add_row(
        "Pass@1",
        wording.percent(a.shared.mean),
        wording.percent(b.shared.mean),
        f"{wording.points(difference.mean)} points",
    )
    table.add_row(
        "95% interval",
        wording.interval(a.shared),
        wording.interval(b.shared),
        wording.points_interval(difference),
    )
    table.add_row("p (sign flips)", "", "", f"{difference.p:.2g}")
    table.add_row("changed", "", "", f"{len(comparison.gained):,} better, {len(comparison.lost):,} worse")
    table.add_section()
    for field, effort in comparison.effort.items():
        change = wording.change(effort.difference)
        table.add_row(wording.EFFORT_NAMES[field], wording.amount(effort.a), wording.amount(effort.b), change)
    return table


def _changes(title: str, changes: Sequence[Change]) -> "Table":
    from rich.table import Table

    table = Table("instance", title=title)
    for column in ("A", "B"):
        table.add_column(column, justify="right")
    for change in changes[:_PRINTED]:
        table.add_row(wording.printable(change.id), wording.percent(change.a), wording.percent(change.b))
    if len(changes) > _PRINTED:
        table.add_row(f"and {len(changes) - _PRINTED:,} more")
    return table

"""The comparison of two evaluations as one HTML file."""

from collections.abc import Iterable, Sequence
from html import escape

from agent_r3 import report_html as html
from agent_r3.eval import charts, wording
from agent_r3.eval.compare import Change, Comparison, Side, notes

_PARTS_DRAWN = 24
_LEAST_DRAWN = 5  # instances of a repository; fewer say nothing of it


def render(comparison: Comparison) -> str:
    a, b = comparison.a, comparison.b
    told = "".join(f"<li>{escape(note)}</li>" for note in notes(comparison))
    lead = " · ".join(f"{letter}: <b>{_name(side)}</b> ({escape(side.folder)})" for letter, side in _pair(comparison))
    sections = (
        html.tiles(_tiles(comparison)),
        f'<ul class="notes">{told}</ul>' if told else "",
        html.section("Figures", html.figures(_figures(comparison))),
        html.section("Effort", _effort(comparison)) if comparison.effort else "",
        html.section("Resolved more often in B", _changes(comparison.gained)),
        html.section("Resolved less often in B", _changes(comparison.lost)),
        html.section("The two evaluations", _sides(comparison)),
    )
    title = wording.printable(f"{', '.join(b.models)} against {', '.join(a.models)}")
    return html.page(f"agent_r3: {title}", title, lead, sections)


def _pair(comparison: Comparison) -> tuple[tuple[str, Side], tuple[str, Side]]:
    return ("A", comparison.a), ("B", comparison.b)


def _name(side: Side) -> str:
    return escape(wording.printable(", ".join(side.models)))


def _tiles(comparison: Comparison) -> Iterable[html.Tile]:
    difference = comparison.difference
    below = f"95% interval {wording.points_interval(difference)}"
    yield "B - A", f"{wording.points(difference.mean)} points", below
    for letter, side in _pair(comparison):
        yield f"Pass@1 of {letter}", wording.percent(side.shared.mean), f"95% interval {wording.interval(side.shared)}"
    yield "p", f"{difference.p:.2g}", "two-sided, signs of the differences flipped"
    yield "instances", f"{comparison.shared:,}", "with a verdict in both"
    yield "changed", f"{len(comparison.gained) + len(comparison.lost):,}", _counts(comparison)
    for name in ("turns", "sampled_tokens", "seconds"):
        if effort := comparison.effort.get(name):
            shown = f"{wording.amount(effort.a)} → {wording.amount(effort.b)}"
            yield f"{wording.EFFORT_NAMES[name]} an episode", shown, "mean, A → B"


def _counts(comparison: Comparison) -> str:
    return f"{len(comparison.gained):,} better, {len(comparison.lost):,} worse in B"


def _figures(comparison: Comparison) -> Iterable[html.Figure]:
    yield (
        "Instances in A and in B",
        charts.against(comparison.pairs, "against"),
        "Where instances stand by their share of resolved samples, and how many of them; above the line B is better.",
    )
    parts = [(name, part) for name, part in comparison.by_repo.items() if part.instances >= _LEAST_DRAWN]
    drawn = [("all", comparison.difference), *(parts[:_PARTS_DRAWN] if len(comparison.by_repo) > 1 else [])]
    yield (
        "Difference B - A",
        charts.differences([(f"{name} ({d.instances:,})", d.mean, d.low, d.high) for name, d in drawn], "difference"),
        "Mean over instances with its 95% bootstrap interval over instances (10,000 resamples).",
    )
    rows = [("A", comparison.a.shared), ("B", comparison.b.shared)]
    yield (
        "Pass@1 on the shared instances",
        charts.intervals(rows, "sides"),
        "Each with its own 95% interval. The difference is surer than these suggest: instances are paired.",
    )


def _effort(comparison: Comparison) -> str:
    rows = []
    for name, effort in comparison.effort.items():
        d = effort.difference
        interval = (
            f"{wording.amount(d.low)} to {wording.amount(d.high)}" if d.low is not None and d.high is not None else "-"
        )
        rows.append(
            (
                escape(wording.EFFORT_NAMES[name]),
                wording.amount(effort.a),
                wording.amount(effort.b),
                wording.change(d),
                interval,
                f"{d.instances:,}",
            )
        )
    headings = ("mean of an episode", "A", "B", "B - A", "95% interval", "instances")
    return html.table(headings, rows, numbers=range(1, 6))


def _changes(changes: Sequence[Change]) -> str:
    if not changes:
        return "<p>None.</p>"
    rows = [
        (
            f"<div class='id'>{escape(wording.printable(change.id))}</div>",
            escape(wording.printable(change.repo)),
            wording.percent(change.a),
            wording.percent(change.b),
        )
        for change in changes
    ]
    return html.table(("instance", "repository", "A", "B"), rows, numbers=(2, 3))


def _sides(comparison: Comparison) -> str:
    rows = [
        (
            letter,
            _name(side),
            escape(wording.printable(side.dataset)),
            f"{wording.percent(side.pass_at_1.mean)} ({wording.interval(side.pass_at_1)})",
            f"{side.pass_at_1.instances:,}",
            f"{side.pass_at_1.samples:,}",
            f"{side.only:,}",
            f"{side.infrastructure_excluded:,}",
            f"{side.gold_excluded:,}",
        )
        for letter, side in _pair(comparison)
    ]
    headings = (
        *("", "model", "dataset", "Pass@1 over all of its instances", "instances", "samples"),
        *("not in the other", "left out: infrastructure", "left out: gold"),
    )
    return html.table(headings, rows, numbers=range(4, 9))

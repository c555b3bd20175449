"""Figures of an evaluation as people read them, and what they must know before they trust them. Pure."""

import re
from collections.abc import Iterable

from agent_r3.eval.records import VERDICTS
from agent_r3.eval.summary import Report, Spread
from agent_r3.statistics import Difference, PassRate

VERDICT_NAMES = {verdict: verdict.replace("_", " ") for verdict in VERDICTS}
EFFORT_NAMES = {
    "turns": "turns",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "of these from the cache",
    "sampled_tokens": "sampled tokens",
    "seconds": "seconds",
}
_FEW = 20  # instances; with fewer an interval says little
_LISTED = 5
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def error(rate: PassRate) -> str:
    """The standard error; a dash for one instance, which cannot tell how much instances differ."""
    return percent(rate.se) if rate.instances > 1 else "-"


def interval(rate: PassRate) -> str:
    return f"{100 * rate.low:.1f} to {percent(rate.high)}"


def points(difference: float) -> str:
    """In percentage points, with its sign."""
    return f"{100 * difference:+.1f}" if abs(difference) >= 0.0005 else "0.0"


def points_interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return "none: all changed alike"
    return f"{points(difference.low)} to {points(difference.high)}"


def change(difference: Difference) -> str:
    return f"{'+' if difference.mean > 0 else ''}{amount(difference.mean)}"


def amount(value: float) -> str:
    """About three digits, thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def counted(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def printable(text: str) -> str:
    """One line without control characters; bytes that are not UTF-8, which surrogates stand for, as question marks."""
    return _CONTROL.sub("?", " ".join(text.split())).encode(errors="replace").decode()


def shortened(text: str, characters: int) -> str:
    """Printable, and no longer than asked for: the middle of a longer one is left out."""
    text = printable(text)
    half = (characters - 1) // 2
    return text if len(text) <= characters else f"{text[:half]}…{text[-half:]}"


def listed(names: Iterable[str]) -> str:
    names = [*names]
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def spread(value: Spread) -> tuple[str, str, str]:
    return amount(value.mean), amount(value.median), amount(value.p90)


def notes(report: Report) -> list[str]:
    """What a reader must know: what is left out, what is not done yet, what may be wrong. A line each."""
    return [printable(note) for note in (*_left_out(report), *_unfinished(report), *_doubtful(report))]


def _left_out(report: Report) -> Iterable[str]:
    infrastructure = report.infrastructure
    if infrastructure.excluded:
        kinds = ", ".join(f"{kind} {count}" for kind, count in infrastructure.excluded_by.items())
        yield (
            f"{counted(len(infrastructure.excluded), 'sample')} left out: the infrastructure failed, retries included "
            f"({kinds}). Had all of them failed, Pass@1 would be {percent(infrastructure.pass_at_1_if_failed)}. "
            "The next run of the same command tries them again."
        )
    if report.gold_excluded:
        line = (
            f"{counted(len(report.gold_excluded), 'instance')} left out whose gold patch fails here: "
            f"{listed(report.gold_excluded)}."
        )
        if report.pass_at_1_with_gold_excluded is not None:
            line += f" Left in, they make Pass@1 {percent(report.pass_at_1_with_gold_excluded)}."
        yield line


def _unfinished(report: Report) -> Iterable[str]:
    if report.pending:
        yield f"{counted(report.pending, 'prediction')} not graded yet; figures are of the others."
    if report.instances_in_dataset is not None:
        left = report.instances_in_dataset - len(report.gold_excluded) - report.instances_graded
        if left > 0:
            yield (
                f"{counted(left, 'instance')} of the dataset's {report.instances_in_dataset:,} without a verdict. "
                f"Counted as failed, they make Pass@1 {percent(report.pass_at_1_of_dataset)}."
            )
    uneven = {len(instance.graded) for instance in report.instances if instance.graded}
    if len(uneven) > 1:
        yield f"Instances have {min(uneven)} to {max(uneven)} graded samples; each instance weighs the same."


def _doubtful(report: Report) -> Iterable[str]:
    if len(report.models) > 1:
        yield f"Predictions of {len(report.models)} models together: {listed(report.models)}."
    if report.touching_tests:
        yield (
            f"{counted(report.touching_tests, 'patch', 'patches')} change tests or their configuration, "
            f"{report.touching_tests_resolved:,} of them resolved; look at those before you believe them."
        )
    if report.flaky:
        yield f"{counted(report.flaky, 'grading')} flaky: runs of the same tests disagreed."
    if report.pass_at_1.instances < _FEW:
        yield few(report.pass_at_1.instances)


def few(instances: int) -> str:
    return f"Only {counted(instances, 'instance')}: the interval is wide and itself uncertain."


def is_few(instances: int) -> bool:
    return instances < _FEW

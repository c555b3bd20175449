"""Figures of evaluations as inline SVG. Labels may come from anywhere; dollar signs in them begin no formula."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from agent_r3.eval.records import Verdict
from agent_r3.eval.wording import percent, points, shortened
from agent_r3.report_charts import REPLAY, FloatArray, drawn
from agent_r3.statistics import PassAtK, PassRate

COLORS: dict[Verdict | None, str] = {
    "resolved": "#15803d",
    "failed": "#dc2626",
    "empty_patch": "#64748b",
    "not_applied": "#b45309",
    "error": "#7e22ce",
    None: "#cbd5e1",
}
NOT_RESOLVED = "#cbd5e1"  # beside the green of "resolved", for whoever sees no red
_ROW, _FRAME = 0.27, 0.75  # inches: a row, and what axes and labels need around them
_LABEL_CHARS = 34
_BINS = 24

Bars = Sequence[tuple[str, str, Sequence[float]]]  # label, color, a value for each row


def intervals(rows: Sequence[tuple[str, PassRate]], salt: str) -> str | None:
    """A dot with its 95% interval for each row, first row on top."""
    if not rows:
        return None
    labels = [f"{_short(label)} ({rate.instances:,})" for label, rate in rows]

    def draw(axes: Axes) -> None:
        for row, (_, rate) in enumerate(rows):
            axes.plot((rate.low, rate.high), (row, row), color=REPLAY, linewidth=5, alpha=0.25, solid_capstyle="butt")
            axes.plot([rate.mean], [row], "o", color=REPLAY, markersize=5)
            axes.annotate(percent(rate.mean), (1.03, row), color="#0f172a", va="center", annotation_clip=False)
        _rows(axes, labels)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(_per_cent)
        axes.set_xlabel("Pass@1")

    return drawn(draw, salt, height=_height(len(rows)), plain_text=True)


def pass_at_ks(estimates: Sequence[PassAtK]) -> str | None:
    """pass@k over k, with two standard errors; None for a single k."""
    if len(estimates) < 2:
        return None
    k = np.array([estimate.k for estimate in estimates], np.float64)
    mean, se = (np.array([getattr(estimate, name) for estimate in estimates]) for name in ("mean", "se"))

    def draw(axes: Axes) -> None:
        low, high = np.clip(mean - 1.96 * se, 0, 1), np.clip(mean + 1.96 * se, 0, 1)
        axes.fill_between(k, low, high, color=REPLAY, alpha=0.15, linewidth=0)
        axes.plot(k, mean, color=REPLAY, marker="o", markersize=4, linewidth=1.4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(k, [str(estimate.k) for estimate in estimates])
        axes.minorticks_off()
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("k")
        axes.set_ylabel("pass@k")

    return drawn(draw, "pass@k", plain_text=True)


def stacked_rows(labels: Sequence[str], parts: Bars, xlabel: str, salt: str, *, legend: bool = True) -> str | None:
    """Horizontal bars, a row each, parts side by side, the row's total behind it; None when all are zero."""
    values = np.array([part for _, _, part in parts], np.float64)  # [parts, rows]
    if not values.size or not values.any():
        return None

    def draw(axes: Axes) -> None:
        left = np.zeros(len(labels))
        for (label, color, _), part in zip(parts, values, strict=True):
            if part.any():
                axes.barh(np.arange(len(labels)), part, left=left, height=0.72, color=color, label=label)
                left += part
        for row, total in enumerate(left):
            axes.annotate(
                f"{total:,.0f}", (total, row), (4, 0), textcoords="offset points", color="#0f172a", va="center"
            )
        _rows(axes, [_short(label) for label in labels])
        axes.set_xlim(0, left.max() * 1.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.set_xlabel(xlabel)
        if legend:
            _legend(axes)

    return drawn(draw, salt, height=_height(len(labels)) + 0.25, plain_text=True)


def histogram(
    parts: Sequence[tuple[str, str, Sequence[float]]], xlabel: str, salt: str, *, whole: bool = False
) -> str | None:
    """How values (label, color, values) are distributed, stacked; None without a value. `whole` for small counts."""
    parts = [part for part in parts if len(part[2])]
    if not parts:
        return None
    everything = np.concatenate([np.asarray(values, np.float64) for _, _, values in parts])
    edges = _edges(everything, whole)

    def draw(axes: Axes) -> None:
        axes.hist(
            [values for _, _, values in parts],
            bins=list(edges),
            stacked=True,
            color=[color for _, color, _ in parts],
            label=[label for label, _, _ in parts],
            rwidth=0.92,
        )
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=whole, nbins=8))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel(xlabel)
        axes.set_ylabel("episodes")
        _legend(axes)

    return drawn(draw, salt, plain_text=True)


def differences(rows: Sequence[tuple[str, float, float | None, float | None]], salt: str) -> str:
    """A dot for each (label, mean, low, high) in percentage points around a line at zero."""
    reach = max(abs(value) for row in rows for value in row[1:] if value is not None) * 1.25 or 0.1

    def draw(axes: Axes) -> None:
        axes.axvline(0, color="#475569", linewidth=1)
        for row, (_, mean, low, high) in enumerate(rows):
            color = _change_color(mean)
            if low is not None and high is not None:
                axes.plot((low, high), (row, row), color=color, linewidth=5, alpha=0.25, solid_capstyle="butt")
            axes.plot([mean], [row], "o", color=color, markersize=5)
            axes.annotate(points(mean), (1.02, row), xycoords=("axes fraction", "data"), va="center")
        _rows(axes, [_short(label) for label, *_ in rows])
        axes.set_xlim(-reach, reach)
        axes.xaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 1):+g}" if value else "0")
        axes.set_xlabel("difference in Pass@1, percentage points")

    return drawn(draw, salt, height=_height(len(rows)), plain_text=True)


def against(pairs: Sequence[tuple[float, float, int]], salt: str) -> str:
    """An instance's mean in A across, in B upwards; of (a, b, instances) the area and a number tell how many."""
    a, b, counts = (np.array(values, np.float64) for values in zip(*pairs, strict=True))
    colors = [_change_color(change) for change in b - a]

    def draw(axes: Axes) -> None:
        axes.plot((0, 1), (0, 1), color="#cbd5e1", linewidth=1, zorder=1)
        axes.scatter(a, b, s=90 + 900 * counts / counts.max(), c=colors, alpha=0.35, linewidth=0, zorder=2)
        for x, y, count in pairs:
            axes.annotate(f"{count:,}", (x, y), ha="center", va="center", color="#0f172a")
        for limits, formatter in ((axes.set_xlim, axes.xaxis), (axes.set_ylim, axes.yaxis)):
            limits(-0.14, 1.14)
            formatter.set_major_formatter(_per_cent)
        axes.set_xlabel("resolved in A")
        axes.set_ylabel("resolved in B")

    return drawn(draw, salt, height=3.6, plain_text=True)


def _change_color(change: float) -> str:
    return "#15803d" if change > 0 else "#dc2626" if change < 0 else "#94a3b8"


def _height(rows: int) -> float:
    return _FRAME + _ROW * max(rows, 2)


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _per_cent(value: float, _: object) -> str:
    return f"{100 * value:.0f}%"


def _legend(axes: Axes) -> None:
    entries = len(axes.get_legend_handles_labels()[1])
    columns = entries if entries <= 5 else 3
    axes.figure.legend(loc="outside upper center", ncols=columns, handlelength=1, columnspacing=1.2)


def _edges(values: FloatArray, whole: bool) -> FloatArray:
    """Bins that hold whole numbers one by one where these are few, else equal ones, fewer for fewer values."""
    least, most = float(values.min()), float(values.max())
    if whole and most - least < 2 * _BINS:
        return np.arange(least - 0.5, most + 1)
    bins = int(np.clip(2 * np.sqrt(len(values)), 5, _BINS))
    return np.linspace(least, most if most > least else least + 1, bins + 1)


def _short(label: str) -> str:
    return shortened(label, _LABEL_CHARS)

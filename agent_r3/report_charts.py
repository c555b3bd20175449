"""The report's figures: a run's metrics in, inline SVG out. Text stays text, so the page is small and searchable."""

import io
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Steps = Sequence[Mapping[str, float]]
FloatArray = npt.NDArray[np.float64]

REPLAY, NATIVE = "#2563eb", "#ea580c"
_PALETTE = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#ca8a04", "#db2777", "#64748b", "#4d7c0f")
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#94a3b8",
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.7,
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "axes.labelcolor": "#475569",
    "legend.frameon": False,
}


def series(steps: Steps, name: str) -> FloatArray:
    """One metric over the steps, NaN where a step lacks it. [S]"""
    return np.array([step.get(name, np.nan) for step in steps], np.float64)


def kinds(steps: Steps, prefix: str, suffix: str = "") -> list[str]:
    """What stands for `<...>` in `prefix<...>suffix`, in order of first appearance."""
    found: dict[str, None] = {}
    for step in steps:
        for name in step:
            if name.startswith(prefix) and name.endswith(suffix):
                found[name[len(prefix) : len(name) - len(suffix)]] = None
    return list(found)


def lines(
    steps: Steps,
    curves: Sequence[tuple[str, str]],
    ylabel: str,
    *,
    ylim: tuple[float, float] | None = None,
    log: bool = False,
) -> str | None:
    """Curves of (label, metric), on a log scale if asked for; None when no step has any of them."""
    present = [(label, series(steps, name)) for label, name in curves if np.isfinite(series(steps, name)).any()]
    if not present:
        return None

    def draw(axes: Axes, x: FloatArray) -> None:
        for color, (label, y) in zip(_PALETTE, present, strict=False):
            axes.plot(x, y, color=color, marker="o", markersize=3, linewidth=1.4, label=label)
        if len(present) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=len(present))
        if log:
            _log_scale(axes, np.concatenate([y for _, y in present]))
        if ylim is not None:
            axes.set_ylim(*ylim)

    return _figure(steps, draw, ylabel)


def pair(
    steps: Steps, replay: str, native: str, ylabel: str, pooled: tuple[float | None, float | None], what: str = "pooled"
) -> str | None:
    """With and without replay on a log scale (zeros at its foot), each with its figure for the whole run, dashed."""
    curves = [(series(steps, replay), REPLAY, "with replay"), (series(steps, native), NATIVE, "without replay")]
    values = np.concatenate([y for y, _, _ in curves])
    if not np.isfinite(values).any():
        return None

    def draw(axes: Axes, x: FloatArray) -> None:
        for (y, color, label), whole in zip(curves, pooled, strict=True):
            if not np.isfinite(y).any():
                continue
            shown = label if whole is None else f"{label}, {what} {whole:.2g}"
            axes.plot(x, y, color=color, marker="o", markersize=3.5, linewidth=0.6, alpha=0.85, label=shown)
            if whole:
                axes.axhline(whole, color=color, linestyle=(0, (5, 3)), linewidth=1.2)
        _log_scale(axes, values)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=2)

    return _figure(steps, draw, ylabel)


def banded(
    steps: Steps, name: str, bounds: tuple[str, str], ylabel: str, *, ylim: tuple[float, float] | None = None
) -> str | None:
    """A curve through the steps that have the metric, with a band between `bounds` where they are; None for no step."""
    y = series(steps, name)
    there = np.isfinite(y)
    if not there.any():
        return None
    low, high = (series(steps, bound)[there] for bound in bounds)

    def draw(axes: Axes, x: FloatArray) -> None:
        axes.fill_between(x[there], low, high, color=_PALETTE[0], alpha=0.15, linewidth=0)
        axes.plot(x[there], y[there], color=_PALETTE[0], marker="o", markersize=3.5, linewidth=1.4)
        if ylim is not None:
            axes.set_ylim(*ylim)

    return _figure(steps, draw, ylabel)


def stacked(steps: Steps, parts: Sequence[tuple[str, FloatArray]], ylabel: str) -> str | None:
    """Bars per step, the parts (label, values [S]) on top of each other; None when all are zero."""
    present = [(label, np.nan_to_num(values)) for label, values in parts if np.nan_to_num(values).any()]
    if not present:
        return None

    def draw(axes: Axes, x: FloatArray) -> None:
        bottom = np.zeros(len(x))
        for index, (label, values) in enumerate(present):
            axes.bar(x, values, bottom=bottom, width=0.8, color=_PALETTE[index % len(_PALETTE)], label=label)
            bottom += values
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1)

    return _figure(steps, draw, ylabel)


def _log_scale(axes: Axes, values: FloatArray) -> None:
    """Log scale of what is positive; zeros, which a log scale cannot show, stand at its foot."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not len(positive):
        return
    least, most = float(positive.min()), float(positive.max())
    if (values == 0).any():
        axes.set_yscale("symlog", linthresh=least)
        axes.set_ylim(0, most * 1.6)
    else:
        axes.set_yscale("log")
    if most < 20 * least:  # within about a decade plain numbers read better than powers of ten
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")


def _figure(steps: Steps, draw: Callable[[Axes, FloatArray], None], ylabel: str) -> str:
    x = series(steps, "step")

    def by_step(axes: Axes) -> None:
        draw(axes, x)
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(x.min() - 0.6, x.max() + 0.6)

    return drawn(by_step, ylabel)


def drawn(draw: Callable[[Axes], None], salt: str, *, height: float = 2.9, plain_text: bool = False) -> str:
    """Axes 5.6 inches wide as inline SVG. `salt` differs between the figures of a page.

    `plain_text` is for labels from outside, in which a dollar sign begins no formula.
    """
    # The salt makes ids of clip paths differ between figures of one page and equal between two runs of the report.
    with rc_context({**_STYLE, "svg.hashsalt": salt, "text.parse_math": not plain_text}):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue())


def _inline(svg: str) -> str:
    """Only the element, without document type, metadata and name-space addresses, which HTML does not need."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    return re.sub(r'(?<= )(width|height)="[\d.]+pt" ?', "", svg, count=2)  # the page sets the size

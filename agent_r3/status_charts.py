"""Small line plots as inline SVG, quick enough for a page that is drawn anew every two seconds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

_PALETTE = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#ca8a04", "#db2777", "#64748b")
_WIDTH, _HEIGHT = 420, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 26, 38
_MARKED = 60  # curves of at most so many points have a mark on each, with its value


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through `points`; a point that is not finite leaves a gap."""

    label: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values from `low` to `high` onto pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = map(_log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        if self.log:
            powers = range(round(_log(self.low)), round(_log(self.high)) + 1)
            return [10.0**power for power in powers[:: math.ceil(len(powers) / most)]]
        step = _nice((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def plot(
    curves: Sequence[Curve],
    xlabel: str,
    *,
    ylim: tuple[float, float] | None = None,
    log: bool = False,
    band: Sequence[tuple[float, float, float]] = (),
) -> str | None:
    """The curves as SVG, with a shaded `band` of (x, low, high); None where nothing is finite.

    On a log scale what is not positive stands at the foot, a decade below the rest.
    """
    drawn = [Curve(curve.label, [(x, y) for x, y in curve.points if math.isfinite(x)]) for curve in curves]
    drawn = [curve for curve in drawn if any(math.isfinite(y) for _, y in curve.points)]
    if not drawn:
        return None
    xs = [x for curve in drawn for x, _ in curve.points]
    ys = [y for curve in drawn for _, y in curve.points if math.isfinite(y)]
    low, high = (min(xs), max(xs)) if max(xs) > min(xs) else (xs[0] - 0.5, xs[0] + 0.5)
    x_axis = _Axis(low, high, _LEFT, _WIDTH - _RIGHT)
    y_axis = _y_axis(ys, ylim, log and max(ys) > 0)
    parts = [*_grid(x_axis, y_axis, xlabel), _shade(band, x_axis, y_axis)]
    for color, curve in zip(_colors(), drawn, strict=False):
        parts.append(_line(curve, color, x_axis, y_axis))
    if len(drawn) > 1:
        parts.append(_legend(drawn))
    said = escape(", ".join(curve.label for curve in drawn))
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{said}" font-size="12">{"".join(parts)}</svg>'


def compact(value: float) -> str:
    """At most four characters of a number and a sign or unit: 0.25, 12, 3.4k, 1.2M, 2e-05."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _y_axis(ys: Sequence[float], ylim: tuple[float, float] | None, log: bool) -> _Axis:
    foot, head = _HEIGHT - _BOTTOM, _TOP
    if log:
        positive = [y for y in ys if y > 0]
        least, most = math.floor(_log(min(positive))), math.ceil(_log(max(positive)))
        least -= len(positive) < len(ys)
        return _Axis(10.0**least, 10.0 ** max(most, least + 1), foot, head, log=True)
    if ylim is not None:
        return _Axis(*ylim, foot, head)
    low, high = min(0.0, min(ys)), max(ys)
    return _Axis(low, high + 0.06 * (high - low) if high > low else low + 1, foot, head)


def _grid(x_axis: _Axis, y_axis: _Axis, xlabel: str) -> Iterable[str]:
    for value in y_axis.ticks():
        y = y_axis.at(value)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#475569">{compact(value)}</text>'
    for value in x_axis.ticks(6):
        x = x_axis.at(value)
        foot = _HEIGHT - _BOTTOM + 15
        yield f'<text x="{x:.1f}" y="{foot}" text-anchor="middle" fill="#475569">{compact(value)}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle" fill="#475569">{escape(xlabel)}</text>'


def _shade(band: Sequence[tuple[float, float, float]], x_axis: _Axis, y_axis: _Axis) -> str:
    inside = [(x, low, high) for x, low, high in band if all(map(math.isfinite, (x, low, high)))]
    if len(inside) < 2:
        return ""
    upper = [f"{x_axis.at(x):.1f},{y_axis.at(high):.1f}" for x, _, high in inside]
    lower = [f"{x_axis.at(x):.1f},{y_axis.at(low):.1f}" for x, low, _ in reversed(inside)]
    return f'<polygon points="{" ".join(upper + lower)}" fill="{_PALETTE[0]}" fill-opacity="0.15"/>'


def _line(curve: Curve, color: str, x_axis: _Axis, y_axis: _Axis) -> str:
    path, pen = [], "M"
    for x, y in curve.points:
        if math.isfinite(y):
            path.append(f"{pen}{x_axis.at(x):.1f} {y_axis.at(y):.1f}")
            pen = "L"
        else:
            pen = "M"
    finite = [(x, y) for x, y in curve.points if math.isfinite(y)]
    marked = finite if len(finite) <= _MARKED else finite[-1:]
    marks = "".join(
        f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="2.4" fill="{color}">'
        f"<title>{escape(curve.label)}: {y:.4g} at {x:.4g}</title></circle>"
        for x, y in marked
    )
    return f'<path d="{" ".join(path)}" fill="none" stroke="{color}" stroke-width="1.6"/>{marks}'


def _legend(curves: Sequence[Curve]) -> str:
    """In one row above the axes; labels are cut to their share of it."""
    room = (_WIDTH - _LEFT - _RIGHT) / len(curves)
    letters = max(int((room - 16) / 6.5), 3)
    parts = []
    for index, (color, curve) in enumerate(zip(_colors(), curves, strict=False)):
        x = _LEFT + index * room
        label = curve.label if len(curve.label) <= letters else curve.label[: letters - 1] + "…"
        parts.append(f'<circle cx="{x + 5:.1f}" cy="10" r="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 13:.1f}" y="14" fill="#0f172a">{escape(label)}</text>')
    return "".join(parts)


def _colors() -> Iterable[str]:
    while True:
        yield from _PALETTE


def _log(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def _nice(step: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))

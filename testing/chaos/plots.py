"""Plots of a chaos run as inline SVG, all with the same time axis. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tidelog.testing.chaos.spans import Span

WIDTH, LEFT, RIGHT = 1140, 64, 24
ROW_HEIGHT, PLOT_HEIGHT, FOOT = 20, 170, 20
MARK_COLOR = "#c62828"
READY_OPACITY = 0.3
"""Of the time after a fault until all nodes are ready."""
TICKS_MAX = 12
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600)
Mark = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Axis:
    """Time, from 0 on the left."""

    seconds: float

    def x(self, at_s: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.seconds, 1)

    def ticks(self) -> list[int]:
        step = next((one for one in STEPS_S if self.seconds / one <= TICKS_MAX), STEPS_S[-1])
        return list(range(0, int(self.seconds) + 1, step))


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    values: Sequence[float | None]
    """One for each second; None is a gap."""
    color: str


def legend(curves: Sequence[Curve]) -> str:
    items = "".join(f'<span><i style="background:{one.color}"></i>{escape(one.name)}</span>' for one in curves)
    return f"<div class=legend>{items}</div>"


def faults_plot(spans: Sequence[Span], nodes: Sequence[int], marks: Sequence[Mark], axis: Axis) -> str:
    """A row for each node, and one for faults of the cluster."""
    rows: list[int | None] = [*nodes, None]
    kinds = sorted({span.kind for span in spans})
    colors = {kind: _color(index, len(kinds)) for index, kind in enumerate(kinds)}
    height = ROW_HEIGHT * len(rows) + FOOT
    parts = []
    for index, node in enumerate(rows):
        y = index * ROW_HEIGHT
        name = "cluster" if node is None else f"node {node}"
        parts.append(f'<text x="{LEFT - 6}" y="{y + 14}" text-anchor="end">{name}</text>')
        parts.append(f'<path d="M{LEFT} {y + ROW_HEIGHT}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".12"/>')
    for span in spans:
        y = ROW_HEIGHT * (rows.index(span.node) if span.node in rows else len(nodes)) + 3
        end_s = max(span.end_s, span.begin_s)
        details = "; ".join([f"{span.kind} ({span.why}), {end_s - span.begin_s:.1f} s", *span.notes])
        bars = [(span.begin_s, end_s, 1.0), (end_s, max(span.ready_s, end_s), READY_OPACITY)]
        parts += [
            f'<rect x="{axis.x(begin)}" y="{y}" width="{max(1.0, axis.x(end) - axis.x(begin)):.1f}" '
            f'height="{ROW_HEIGHT - 6}" fill="{colors[span.kind]}" opacity="{opacity}">'
            f"<title>{escape(details)}</title></rect>"
            for begin, end, opacity in bars
            if end > begin or opacity == 1.0
        ]
    parts += _marks(marks, axis, height - FOOT) + _time_axis(axis, height - FOOT)
    names = legend([Curve(kind, [], colors[kind]) for kind in kinds])
    note = "<p class=small>Pale: until all nodes are ready again. Red lines: anomalies, by their number below.</p>"
    return names + _svg(height, parts) + note


def _color(index: int, count: int) -> str:
    """Neighbours differ in lightness, too."""
    return f"hsl({index * 360 // max(1, count)} 60% {(38, 58)[index % 2]}%)"


def log_plot(curves: Sequence[Curve], marks: Sequence[Mark], axis: Axis) -> str:
    """Logarithmic, from 1; what is less is at the bottom."""
    highest = max((value for one in curves for value in one.values if value is not None), default=10.0)
    decades = max(1, math.ceil(math.log10(max(highest, 10.0))))
    levels = [10.0**decade for decade in range(decades + 1)]

    def y(value: float) -> float:
        return round(6 + (PLOT_HEIGHT - 6) * (1 - math.log10(max(value, 1.0)) / decades), 1)

    parts = []
    for level in levels:
        parts.append(f'<text x="{LEFT - 6}" y="{y(level) + 4}" text-anchor="end">{level:,.10g}</text>')
        parts.append(f'<path d="M{LEFT} {y(level)}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".12"/>')
    for curve in curves:
        points, pen = [], "M"
        for second, value in enumerate(curve.values):
            if value is not None:
                points.append(f"{pen}{axis.x(second + 0.5)} {y(value)}")
            pen = "M" if value is None else "L"
        parts.append(f'<path d="{"".join(points)}" fill="none" stroke="{curve.color}" stroke-width="1.3"/>')
    parts += _marks(marks, axis, PLOT_HEIGHT) + _time_axis(axis, PLOT_HEIGHT)
    return _svg(PLOT_HEIGHT + FOOT, parts)


def _marks(marks: Sequence[Mark], axis: Axis, height: int) -> list[str]:
    return [
        f"<g><title>{escape(f'{number}: {text}')}</title>"
        f'<path d="M{axis.x(at_s)} 0V{height}" stroke="{MARK_COLOR}" stroke-width="1.5"/>'
        f'<text x="{axis.x(at_s) + 3}" y="10" style="fill:{MARK_COLOR}">{number}</text></g>'
        for number, (at_s, text) in enumerate(marks, start=1)
    ]


def _time_axis(axis: Axis, y: int) -> list[str]:
    parts = [f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".5"/>']
    for at_s in axis.ticks():
        label = f"{at_s // 60}:{at_s % 60:02}"
        parts.append(f'<text x="{axis.x(at_s)}" y="{y + 14}" text-anchor="middle">{label}</text>')
    return parts


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'

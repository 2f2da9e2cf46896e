"""The curves of the page: thinned to what a screen can show, and drawn as SVG by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from tokrate.compare.series import Floats, Series

MOST_POINTS = 300
WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 28
COLOURS = 8
"""Colours of the page; further runs get the same ones with dashes."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's line: mean of its windows by place, and what it is called."""

    label: str
    number: int
    """Which of the runs, from 0: its colour."""
    x: Floats
    y: Floats


def curve_of(series: Series, label: str, number: int, rate: str, over: str) -> Curve:
    """A run's rate over steps or over active tokens so far.

    Args:
        series: The run.
        label: What it is called.
        number: Which of the runs it is.
        rate: A column of the series.
        over: `steps` or `tokens`.
    """
    y = series.columns[rate].astype(float)
    elapsed_s = np.nan_to_num(series.columns["elapsed_s"].astype(float))
    x = series.step.astype(float) if over == "steps" else series.total_active_tokens
    known = np.isfinite(x) & np.isfinite(y)
    x, y, weight = x[known], y[known], np.maximum(elapsed_s[known], 1e-9)
    if len(x) > MOST_POINTS:  # Σ tokens ÷ Σ seconds of neighbours
        edges = np.linspace(0, len(x), MOST_POINTS + 1).astype(int)[:-1]
        y = np.add.reduceat(y * weight, edges) / np.add.reduceat(weight, edges)
        x = np.maximum.reduceat(x, edges)
    return Curve(label, number, x, y)


def draw_curves(curves: Sequence[Curve], title: str, over: str) -> str:
    """An SVG with axes; empty text where there is nothing to draw."""
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return ""
    most_x = max(float(curve.x.max()) for curve in curves)
    # Above the 99th percentile is what one lucky or mistimed window shows.
    most_y = max(float(np.percentile(curve.y, 99)) for curve in curves)
    x_ticks, y_ticks = ticks(most_x), ticks(most_y * 1.05)
    x_scale = (WIDTH - LEFT - RIGHT) / (max(most_x, x_ticks[-1] * 0.999) or 1)
    y_scale = (HEIGHT - TOP - BOTTOM) / (y_ticks[-1] or 1)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *(_grid_line(HEIGHT - BOTTOM - tick * y_scale, tick) for tick in y_ticks),
        *(
            f'<text class="tick" x="{LEFT + tick * x_scale:.1f}" y="{HEIGHT - 8}" '
            f'text-anchor="{"end" if tick == x_ticks[-1] else "middle"}">{short(tick)}</text>'
            for tick in x_ticks
        ),
    ]
    for curve in curves:
        x = LEFT + curve.x * x_scale
        y = np.maximum(HEIGHT - BOTTOM - curve.y * y_scale, TOP)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        dashes = ' stroke-dasharray="5 3"' if curve.number >= COLOURS else ""
        parts.append(
            f'<polyline class="run c{curve.number % COLOURS}" data-run="{curve.number}"{dashes} '
            f'points="{points}"><title>{escape(curve.label)}</title></polyline>'
        )
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{TOP + 10}" text-anchor="end">')
    parts.append(f"over {escape(over)}</text></svg>")
    return "".join(parts)


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`.

    >>> ticks(27)
    [0.0, 10.0, 20.0, 30.0]
    """
    if not most > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most))
    distance = next(power * m for m in (0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if most / (power * m) <= 5)
    return [distance * i for i in range(math.ceil(most / distance) + 1)]


def short(number: float) -> str:
    """A number for an axis.

    >>> short(1500), short(2_000_000), short(0.25)
    ('1.5k', '2M', '0.25')
    """
    for size, mark in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:g}{mark}"
    return f"{number:g}"


def _grid_line(y: float, tick: float) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
    )

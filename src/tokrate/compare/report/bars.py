"""The factor bars of the page: each cause to the left or right of ×1, on a scale of logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from tokrate.compare.factors import Factor
from tokrate.compare.report.cells import FACTOR_TITLES, ratio
from tokrate.compare.result import RunResult

WIDTH, ROW = 420, 24
NAME, NUMBER = 108, 66
MEANING = {
    "raw": "how fast the machine works",
    "unpadded": "how much of it is no padding",
    "unmasked": "how much of the real tokens enters the loss",
    "active_share": "how much of it enters the loss",
    "busy": "how fast it works while it does not wait",
    "fed": "how much of the time it does not wait for data",
}


def draw_bars(runs: Sequence[RunResult]) -> str:
    """A figure for each run that has factors, all on one scale."""
    shown = [run for run in runs if run.versus is not None and run.versus.factors]
    if not shown:
        return ""
    all_factors = [f for run in shown for f in _rows(run)]
    widest = max([abs(math.log(f.ratio)) for f in all_factors] + [math.log(1.1)])
    return f'<div class="bars">{"".join(_figure(run, widest) for run in shown)}</div>'


def _rows(run: RunResult) -> list[Factor]:
    """The factors, with the parts of raw below it."""
    versus = run.versus
    assert versus is not None
    first, *rest = versus.factors
    return [first, *versus.split, *rest]


def _figure(run: RunResult, widest: float) -> str:
    rows = _rows(run)
    versus = run.versus
    assert versus is not None
    height = ROW * len(rows) + 6
    middle = NAME + (WIDTH - NAME - NUMBER) / 2
    scale = (WIDTH - NAME - NUMBER) / 2 / widest
    bars = [_bar(f, 3 + ROW * i, middle, scale) for i, f in enumerate(rows)]
    label = escape(run.label)
    return (
        f"<figure><figcaption><b>{label}</b> {ratio(versus.ratio)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="factors of {label}">'
        f'<line class="axis" x1="{middle}" x2="{middle}" y1="0" y2="{height}"/>'
        f"{''.join(bars)}</svg></figure>"
    )


def _bar(factor: Factor, y: float, middle: float, scale: float) -> str:
    size = math.log(factor.ratio) * scale
    is_part = factor.name in ("busy", "fed")
    kind = "part" if is_part else "more" if size >= 0 else "less"
    begin = middle + min(size, 0)
    text = f'<text class="name{" sub" * is_part}" x="{14 * is_part}" y="{y + 15}">'
    span = ""
    if factor.low is not None and factor.high is not None:
        limit = (WIDTH - NAME - NUMBER) / 2
        ends = [max(-limit, min(limit, math.log(end) * scale)) for end in (factor.low, factor.high)]
        span = (
            f'<line class="span" x1="{middle + ends[0]:.1f}" x2="{middle + ends[1]:.1f}" '
            f'y1="{y + 10}" y2="{y + 10}"/>'
        )
    return (
        f"<g><title>{MEANING[factor.name]}</title>"
        f"{text}{FACTOR_TITLES[factor.name]}</text>"
        f'<rect class="{kind}" x="{begin:.1f}" y="{y + 2}" width="{max(abs(size), 1):.1f}" '
        f'height="{10 if is_part else 16}" rx="2"/>{span}'
        f'<text class="number" x="{WIDTH}" y="{y + 15}" text-anchor="end">{ratio(factor.ratio)}'
        "</text></g>"
    )

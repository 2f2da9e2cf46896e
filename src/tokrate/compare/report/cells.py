"""The cells of the tables: the same words and numbers in the terminal, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokrate.compare.factors import Ratio
from tokrate.compare.result import RunResult

UNKNOWN = "–"
FACTOR_TITLES = {
    "raw": "raw",
    "unpadded": "unpadded",
    "unmasked": "unmasked",
    "active_share": "active share",
    "busy": "busy",
    "fed": "fed",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of runs."""

    title: str
    cell: Callable[[RunResult], str]
    always: bool = True
    """False: only where there is room for it."""


def rate(value: float | None) -> str:
    """Tokens per second."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def percent(value: float | None) -> str:
    """A share of 1."""
    return UNKNOWN if value is None else f"{abs(value):.1%}"


def ratio(value: float | None) -> str:
    """A ratio of two runs."""
    return UNKNOWN if value is None else f"×{value:.3f}"


def span(low: float | None, high: float | None) -> str:
    """The ends of an interval."""
    return UNKNOWN if low is None or high is None else f"{low:.3f}–{high:.3f}"


def _active(run: RunResult) -> str:
    if run.active_tps is None and run.active_tps_per_device is not None:
        return f"{rate(run.active_tps_per_device)}/dev"
    return rate(run.active_tps)


def _raw(run: RunResult) -> str:
    if run.raw_tps is None and run.raw_tps_per_device is not None:
        return f"{rate(run.raw_tps_per_device)}/dev"
    return rate(run.raw_tps)


def _versus(run: RunResult) -> str:
    return "reference" if run.versus is None else ratio(run.versus.ratio)


def _span(run: RunResult) -> str:
    if run.versus is None:
        return ""
    return span(run.versus.low, run.versus.high) + (
        "" if run.versus.shows_difference is not False else " ≈"
    )


COLUMNS = (
    Column("run", lambda run: run.label),
    Column("active tok/s", _active),
    Column("raw tok/s", _raw),
    Column("padded", lambda run: percent(run.padded_frac)),
    Column("masked", lambda run: percent(run.masked_frac)),
    Column("wait", lambda run: percent(run.data_wait_frac), always=False),
    Column("windows", lambda run: f"{run.steady_windows:,}", always=False),
    Column("seconds", lambda run: f"{run.steady_s:,.1f}", always=False),
    Column("ratio", _versus),
    Column("95 % interval", _span),
)


def factor_rows(runs: Sequence[RunResult]) -> list[list[str]]:
    """Run, ratio, and the causes: `×2.307 = raw ×0.981 · unpadded ×2.353 · unmasked ×1.000`."""
    return [
        [run.label, ratio(run.versus.ratio), product(run.versus)]
        for run in runs
        if run.versus is not None and run.versus.factors
    ]


def product(versus: Ratio) -> str:
    """The factors, and the two parts of raw where waiting for data was measured."""
    parts = [f"{FACTOR_TITLES[f.name]} {ratio(f.ratio)}" for f in versus.factors]
    if versus.split and parts:
        inside = " · ".join(f"{FACTOR_TITLES[f.name]} {ratio(f.ratio)}" for f in versus.split)
        parts[0] += f" ({inside})"
    return " · ".join(parts)

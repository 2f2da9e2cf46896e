"""Reasons not to take a comparison at face value, each with names and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tokrate.compare.factors import compare_steady
from tokrate.compare.result import Doubt, RunResult
from tokrate.compare.same import Run
from tokrate.compare.steady import Steady, find_steady, speed
from tokrate.record import SCHEMA_VERSION

FEW_WINDOWS = 10
UNEVEN = 1.05
"""Busiest rank ÷ mean, above which ranks wait for each other in earnest."""
STALLED = 0.05
"""Share of the speed that stalls may take before it is said."""
DRIFT = 0.03
LONG_PAUSE = 20.0
"""A pause of so many windows may be a restart that the source does not tell of."""
MANY_UNKNOWN = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """A run with all that is known of it."""

    run: Run
    steady: Steady | None
    result: RunResult


def find_doubts(cases: Sequence[Case]) -> tuple[Doubt, ...]:
    """All doubts: on single runs, then on the runs together."""
    found: list[Doubt] = []
    for case in cases:
        for about, check in ON_ONE.items():
            found += [Doubt(about=about, text=f"{case.run.label}: {said}") for said in check(case)]
    for about, look in ON_ALL.items():
        found += [Doubt(about=about, text=said) for said in look(cases)]
    return tuple(found)


# --- on one run ----------------------------------------------------------------------------------


def _windows(case: Case) -> Iterator[str]:
    count, steady = case.result.windows, case.result.steady_windows
    if not count:
        yield "it has no records yet"
    elif not steady:
        marked = int(case.run.series.warmup.sum())
        why = f", {marked} of them marked as warm-up" if marked else ""
        yield (
            f"warm-up only: none of its {count} windows is steady{why} (the first of each session "
            "is left out)"
        )
    elif steady == 1:
        yield "one steady window: there is no telling how much it varies"
    elif steady < FEW_WINDOWS:
        yield f"only {steady} steady windows: the interval is a rough one"


def _disagreement(case: Case) -> Iterator[str]:
    yield from case.run.disagreements


def _unknown(case: Case) -> Iterator[str]:
    yield from case.run.series.facts.notes


def _padding(case: Case) -> Iterator[str]:
    steady, series = case.steady, case.run.series
    if steady is None or series.facts.written_by != "tokrate":
        return
    if not steady.knows_padding:
        yield (
            "nothing told padding apart, so padding and masking are one factor: pass "
            "attention_mask=, cu_seqlens=, or input_ids= with pad_id= to update()"
        )
        return
    keep = ~(series.first | series.warmup)
    unknown = int(np.isnan(series.columns["padded_frac"][keep]).sum())
    if unknown > MANY_UNKNOWN * keep.sum():
        yield f"padding is unknown in {unknown} of {int(keep.sum())} steady windows"


def _imbalance(case: Case) -> Iterator[str]:
    uneven = case.result.rank_imbalance
    if uneven is not None and uneven > UNEVEN:
        yield f"its busiest rank has {uneven:.2f} times the slots of the mean; the others wait"


def _stalls(case: Case) -> Iterator[str]:
    steady = case.steady
    if steady is None or not steady.active_tps or steady.mean_active_tps is None:
        return
    lost = 1 - steady.mean_active_tps / steady.active_tps
    if abs(lost) > STALLED:
        yield (
            f"over all steady windows it has {steady.mean_active_tps:,.0f} active tokens per "
            f"second, {abs(lost):.0%} {'less' if lost > 0 else 'more'} than in the middle half: "
            "some windows are far off (stalls, or something else used the machine)"
        )


def _drift(case: Case) -> Iterator[str]:
    """Compare the halves of the steady windows, as Geweke (1992) does for Markov chains."""
    series, steady = case.run.series, case.steady
    if steady is None or steady.windows < 2 * FEW_WINDOWS:
        return
    rows = np.flatnonzero(~(series.first | series.warmup))
    early = np.zeros(len(series), bool)
    early[rows[: len(rows) // 2]] = True
    late = np.zeros(len(series), bool)
    late[rows[len(rows) // 2 :]] = True
    before, after = speed(series, early), speed(series, late)
    if not before or not after or abs(after / before - 1) < DRIFT:
        return  # not worth a word, and most often so: without the cost of an interval
    first, second = find_steady(series, 1001, early), find_steady(series, 1002, late)
    if first is None or second is None:
        return
    versus = compare_steady(second, first)
    raw = next((f for f in versus.factors if f.name == "raw"), None) if versus else None
    if raw is not None and raw.shows:
        yield (
            f"not settled: the second half of its windows has {raw.ratio:.3f} times the raw speed "
            "of the first"
        )


def _unknown_sessions(case: Case) -> Iterator[str]:
    series = case.run.series
    if series.facts.knows_sessions or len(series) < 2:
        return
    elapsed_ms = 1000 * series.columns["elapsed_s"].astype(float)
    pause_ms = np.diff(series.time_ms) - elapsed_ms[1:]
    long = (pause_ms > LONG_PAUSE * np.nanmedian(elapsed_ms)) & ~series.first[1:]
    if long.any():
        at = int(np.flatnonzero(long)[0]) + 1
        yield (
            f"{series.facts.source} does not tell of restarts: {pause_ms[at - 1] / 1000:,.0f} s "
            f"lie before step {series.step[at]}; if the run was started again there, one window of "
            "start-up is in the steady state (its journal would tell)"
        )


def _outcome(case: Case) -> Iterator[str]:
    if case.result.outcome in ("failed", "killed"):
        yield (
            f"the run was {case.result.outcome}"
            if case.result.outcome == "killed"
            else ("the run failed")
        )


def _newer(case: Case) -> Iterator[str]:
    version = case.run.series.facts.schema_version
    if version is not None and version > SCHEMA_VERSION:
        yield (
            f"its records are of schema {version}, this tokrate knows {SCHEMA_VERSION}: fields may "
            "mean something else; upgrade tokrate"
        )


ON_ONE: dict[str, Callable[[Case], Iterator[str]]] = {
    "windows": _windows,
    "disagreement": _disagreement,
    "unknown": _unknown,
    "padding": _padding,
    "imbalance": _imbalance,
    "stalls": _stalls,
    "drift": _drift,
    "sessions": _unknown_sessions,
    "outcome": _outcome,
    "schema": _newer,
}


# --- on the runs together ------------------------------------------------------------------------


def _devices(cases: Sequence[Case]) -> Iterator[str]:
    known = [(case.run.label, d) for case in cases if (d := case.result.devices) is not None]
    if len({devices for _, devices in known}) > 1:
        listed = ", ".join(f"{label} {devices}" for label, devices in known)
        yield (
            f"the runs used different numbers of devices ({listed}): compare the rates per device, "
            "too"
        )


def _restarts(cases: Sequence[Case]) -> Iterator[str]:
    counts = [(case.run.label, case.run.series.sessions) for case in cases if case.result.windows]
    if len({count for _, count in counts}) > 1:
        listed = ", ".join(f"{label} {count}" for label, count in counts)
        yield f"the runs were started different numbers of times ({listed})"


def _schemas(cases: Sequence[Case]) -> Iterator[str]:
    found = {v for case in cases if (v := case.run.series.facts.schema_version) is not None}
    if len(found) > 1:
        yield f"the records are of different schemas ({', '.join(map(str, sorted(found)))})"


def _nominal(cases: Sequence[Case]) -> Iterator[str]:
    """Padding that is exactly 0 everywhere, beside a run that has some."""
    known = [case for case in cases if case.steady is not None and case.steady.unpadded is not None]
    zero = [case.run.label for case in known if case.steady and case.steady.unpadded == 1.0]
    if zero and len(zero) < len(known):
        yield (
            f"{', '.join(zero)}: not one slot is padding, in any window; that is right for packed "
            "rows, and wrong where a mask of ones was passed for rows that are padded"
        )


def _numbers(cases: Sequence[Case]) -> Iterator[str]:
    """Runs that are compared by something else than active tokens per second."""
    other = {
        case.result.versus.of
        for case in cases
        if case.result.versus is not None and case.result.versus.of != "active_tps"
    }
    if other:
        yield (
            f"some ratios are of {', '.join(sorted(other))}, the best number that both runs have"
        )


ON_ALL: dict[str, Callable[[Sequence[Case]], Iterator[str]]] = {
    "devices": _devices,
    "sessions": _restarts,
    "schema": _schemas,
    "padding": _nominal,
    "numbers": _numbers,
}

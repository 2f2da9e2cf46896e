"""What a comparison found: the fields of every output (docs/reference/compare.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokrate.compare.factors import Ratio, interval
from tokrate.compare.same import Run
from tokrate.compare.series import Floats
from tokrate.compare.steady import Steady


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run in its steady state. Unknown is None."""

    label: str
    """Name of the run; with its id or place where several runs have one name."""
    run_id: str | None
    """tokrate's id of the run."""
    sources: tuple[str, ...]
    """Where it was read, the one that is used first."""
    written_by: str
    """`tokrate`, or the framework whose metric names were found."""
    outcome: str | None
    """`finished`, `failed`, `killed`, `open` (no end was written); None when unknown."""
    started_unix_ms: int | None
    """When its first window closed, in milliseconds since 1970-01-01 UTC."""
    windows: int
    """Windows that were read, without those that a restart did anew."""
    steady_windows: int
    """Windows of the steady state."""
    steady_s: float
    """Seconds of training in them."""
    sessions: int
    """How many times the run was started, as far as the source tells."""
    devices: int | None
    """Number of devices that the per-device rates divide by."""
    active_tps: float | None
    """Active tokens per second: `raw_tps * (1 - padded_frac - masked_frac)`."""
    active_tps_low: float | None
    """Lower end of its 95 % interval."""
    active_tps_high: float | None
    """Upper end of its 95 % interval."""
    raw_tps: float | None
    """Slots per second in the middle half of the steady time."""
    raw_tps_low: float | None
    """Lower end of its 95 % interval."""
    raw_tps_high: float | None
    """Upper end of its 95 % interval."""
    active_tps_per_device: float | None
    """`active_tps` divided by `devices`."""
    raw_tps_per_device: float | None
    """`raw_tps` divided by `devices`."""
    padded_frac: float | None
    """Padded slots as a share of raw, 0 to 1, over all steady windows."""
    masked_frac: float | None
    """Real tokens that are context only, as a share of raw, 0 to 1, over all steady windows."""
    data_wait_frac: float | None
    """Share of the time spent waiting for data, 0 to 1, in the middle half of the steady time."""
    rank_imbalance: float | None
    """Busiest rank's slots divided by the mean over ranks, in the middle half."""
    mfu: float | None
    """Model FLOP utilisation, 0 to 1, in the middle half."""
    mean_active_tps: float | None
    """Active tokens divided by seconds over all steady windows, stalls included."""
    best_packing: float | None
    """What perfect packing could multiply `active_tps` by at most: 1 ÷ (1 − padded_frac)."""
    block_windows: int | None
    """Windows in a block of the bootstrap."""
    versus: Ratio | None
    """The run against the reference; None for the reference itself, and where nothing that both
    have can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A reason not to take the numbers at face value."""

    about: str
    """What kind of reason: a word to search for in the reference."""
    text: str
    """The reason, with names and numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs against the first one, or the one that was asked for."""

    reference: str
    """Label of the run that the others are compared with."""
    runs: tuple[RunResult, ...]
    """The reference first, the others as they were given."""
    sentences: tuple[str, ...]
    """What follows, in words."""
    doubts: tuple[Doubt, ...]
    """Reasons not to take it at face value."""


def result_of(run: Run, steady: Steady | None, versus: Ratio | None) -> RunResult:
    """The fields of a run, from its steady state."""
    series, facts = run.series, run.series.facts
    found = _numbers(steady)
    return RunResult(
        label=run.label,
        run_id=facts.run_id,
        sources=tuple(s.facts.source for s in (series, *run.others)),
        written_by=facts.written_by,
        outcome=next((o for s in (series, *run.others) if (o := s.facts.outcome)), None),
        started_unix_ms=int(series.time_ms[0]) if len(series) else None,
        windows=len(series),
        steady_windows=steady.windows if steady else 0,
        steady_s=steady.elapsed_s if steady else 0.0,
        sessions=series.sessions,
        devices=steady.devices if steady else None,
        data_wait_frac=steady.data_wait_frac if steady else None,
        rank_imbalance=steady.rank_imbalance if steady else None,
        mfu=steady.mfu if steady else None,
        block_windows=steady.block if steady else None,
        versus=versus,
        **found,
    )


def _numbers(steady: Steady | None) -> dict[str, float | None]:
    found: dict[str, float | None] = dict.fromkeys(_NUMBERS)
    if steady is None:
        return found
    known = steady.windows > 1
    for name, rate, columns in (
        ("active_tps", steady.active_tps, [0, 1, 2]),
        ("raw_tps", steady.raw_tps, [0]),
    ):
        if rate is None:
            continue
        if steady.per_device:
            found[f"{name}_per_device"] = rate
            continue
        found[name] = rate
        found[f"{name}_low"], found[f"{name}_high"] = _ends(
            rate, steady.draws[:, columns].sum(axis=1) if known else None
        )
        if steady.devices:
            found[f"{name}_per_device"] = rate / steady.devices
    found["mean_active_tps"] = None if steady.per_device else steady.mean_active_tps
    if steady.unpadded is not None:
        found["padded_frac"] = 1 - steady.unpadded
        found["best_packing"] = 1 / steady.unpadded if steady.unpadded else None
        if steady.unmasked is not None:
            found["masked_frac"] = steady.unpadded * (1 - steady.unmasked)
    return found


_NUMBERS = (
    *(f"{name}{end}" for name in ("active_tps", "raw_tps") for end in ("", "_low", "_high")),
    *("active_tps_per_device", "raw_tps_per_device", "padded_frac", "masked_frac"),
    *("mean_active_tps", "best_packing"),
)


def _ends(rate: float, draws: Floats | None) -> tuple[float | None, float | None]:
    if rate <= 0:
        return None, None
    return interval(math.log(rate), draws)

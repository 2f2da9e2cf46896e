"""Why one run is faster than another: a product of ratios, which is the ratio itself.

    active_B/active_A = (raw_B/raw_A) × (unpadded_B/unpadded_A) × (unmasked_B/unmasked_A)

and where waiting for data was measured, raw_B/raw_A = (busy_B/busy_A) × (fed_B/fed_A), with
busy = slots per second that was not spent waiting and fed = 1 − data_wait_frac.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tokrate.compare.series import Floats
from tokrate.compare.steady import Steady

INTERVAL = 95
"""Percent of the resamples that an interval holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One cause, as a ratio of the run to the reference."""

    name: str
    """`raw`, `unpadded`, `unmasked`; `busy` and `fed`, whose product is `raw`; or
    `active_share`, in place of `unpadded` and `unmasked`, where padding is unknown."""
    ratio: float
    """The run's number divided by the reference's."""
    low: float | None
    """Lower end of the 95 % interval; None when it cannot be told."""
    high: float | None
    """Upper end."""

    @property
    def shows(self) -> bool:
        """Whether the interval is known and leaves 1 out."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How much faster a run is than the reference, and why."""

    of: str
    """The number that is compared: `active_tps`, or the best that both runs have."""
    ratio: float
    """The run's number divided by the reference's."""
    low: float | None
    """Lower end of the 95 % interval; None with fewer than two steady windows."""
    high: float | None
    """Upper end."""
    factors: tuple[Factor, ...]
    """Causes whose product is `ratio`; empty where they are unknown."""
    split: tuple[Factor, ...]
    """`busy` and `fed`, whose product is the factor `raw`; empty where waiting is unknown."""

    @property
    def shows_difference(self) -> bool | None:
        """Whether the interval leaves 1 out; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return not self.low <= 1 <= self.high


def interval(log_ratio: float, draws: Floats | None) -> tuple[float | None, float | None]:
    """The ends of the interval around a ratio, from resampled deviations of its logarithm."""
    if draws is None:
        return None, None
    edge = (100 - INTERVAL) / 2
    low, high = np.percentile(draws, (edge, 100 - edge))
    return math.exp(log_ratio - high), math.exp(log_ratio - low)


def compare_steady(run: Steady, base: Steady) -> Ratio | None:
    """The ratio of two runs; None when they have no number in common or the reference's is 0."""
    of = _common(run, base)
    if of is None:
        return None
    column = {"active": (0, 1, 2), "raw": (0,)}[of.partition("_")[0]]
    value, reference = _rate(run, of), _rate(base, of)
    if not value or not reference:
        return None
    ratio = value / reference
    low, high = interval(math.log(ratio), _difference(run, base, column))
    factors = _factors(run, base) if of.startswith("active") else ()
    raw = next((factor for factor in factors if factor.name == "raw"), None)
    return Ratio(
        of=of,
        ratio=ratio,
        low=low,
        high=high,
        factors=factors,
        split=_split(run, base, raw.ratio if raw else ratio),
    )


def _common(run: Steady, base: Steady) -> str | None:
    """The best number that both runs have."""
    for of in ("active_tps", "active_tps_per_device", "raw_tps", "raw_tps_per_device"):
        if _rate(run, of) is not None and _rate(base, of) is not None:
            return of
    return None


def _rate(steady: Steady, of: str) -> float | None:
    rate = steady.active_tps if of.startswith("active") else steady.raw_tps
    if rate is None or of.endswith("_per_device") == steady.per_device:
        return rate
    if steady.per_device or not steady.devices:
        return None
    return rate / steady.devices


def _factors(run: Steady, base: Steady) -> tuple[Factor, ...]:
    if run.raw_tps is None or base.raw_tps is None or not run.unmasked or not base.unmasked:
        return ()
    of = "raw_tps_per_device" if run.per_device or base.per_device else "raw_tps"
    raw, raw_base = _rate(run, of), _rate(base, of)
    if raw is None or raw_base is None:
        return ()
    speed = _factor("raw", raw, raw_base, _difference(run, base, (0,)))
    if run.unpadded is None or base.unpadded is None:
        share = (run.unpadded or 1.0) * run.unmasked
        share_base = (base.unpadded or 1.0) * base.unmasked
        return speed, _factor("active_share", share, share_base, _difference(run, base, (1, 2)))
    return (
        speed,
        _factor("unpadded", run.unpadded, base.unpadded, _difference(run, base, (1,))),
        _factor("unmasked", run.unmasked, base.unmasked, _difference(run, base, (2,))),
    )


def _split(run: Steady, base: Steady, raw: float) -> tuple[Factor, ...]:
    if run.data_wait_frac is None or base.data_wait_frac is None or run.raw_tps is None:
        return ()
    fed, fed_base = 1 - run.data_wait_frac, 1 - base.data_wait_frac
    if fed <= 0 or fed_base <= 0:
        return ()
    return _factor("busy", raw, fed / fed_base, None), _factor("fed", fed, fed_base, None)


def _factor(name: str, value: float, reference: float, draws: Floats | None) -> Factor:
    ratio = value / reference
    low, high = interval(math.log(ratio), draws)
    return Factor(name=name, ratio=ratio, low=low, high=high)


def _difference(run: Steady, base: Steady, columns: tuple[int, ...]) -> Floats | None:
    """Resampled deviations of the logarithm of a ratio; None where a run has but one window."""
    if run.windows < 2 or base.windows < 2:
        return None
    chosen = list(columns)
    found: Floats = run.draws[:, chosen].sum(axis=1) - base.draws[:, chosen].sum(axis=1)
    return found

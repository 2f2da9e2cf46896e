"""The steady state of a run: how fast it is once it has begun, and how sure that is.

    windows ──► without the first of each session and without marked warm-up
            ──► speed: Σ tokens ÷ Σ seconds of the middle half (by speed) of the steady seconds
            ──► shares: padded, masked, from the tokens of all steady windows
            ──► active_tps = raw_tps × unpadded × unmasked

Robust where the machine makes noise, complete where tokens are counted. Sources and reasons:
docs/explanation/statistics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokrate.compare.blocks import block_length, resample
from tokrate.compare.series import Bools, Floats, Series

TRIM = 0.25
"""Share of the steady seconds that is left out at either end, the slowest and the fastest."""
ROUNDING = 1e-6
"""How far float32 rounding may take a share of everything from 1."""

FACTORS = ("raw", "unpadded", "unmasked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A run in its steady state. Unknown is None; rates are per device where `per_device`."""

    windows: int
    """Windows that count."""
    elapsed_s: float
    """Seconds of training in them."""
    per_device: bool
    """Whether only rates per device are known."""
    raw_tps: float | None
    unpadded: float | None
    """Share of slots that hold a real token."""
    unmasked: float | None
    """Share of real tokens that are active; where padding is unknown, share of all slots."""
    active_tps: float | None
    """`raw_tps * unpadded * unmasked`."""
    mean_active_tps: float | None
    """Σ active tokens ÷ Σ seconds of all steady windows, stalls included."""
    data_wait_frac: float | None
    rank_imbalance: float | None
    mfu: float | None
    devices: int | None
    knows_padding: bool
    block: int
    """Windows in a block of the bootstrap."""
    draws: Floats
    """Resampled deviations of the logarithms of `FACTORS`, one row for each resample."""


@dataclass(frozen=True, slots=True)
class _Windows:
    """The steady windows, as numbers of tokens and seconds."""

    elapsed_s: Floats
    rate: Floats
    """Slots per second; active tokens per second where slots are unknown."""
    raw: Floats
    active: Floats
    padded: Floats
    per_device: bool
    knows_raw: bool
    knows_active: bool


def find_steady(series: Series, stream: int, rows: Bools | None = None) -> Steady | None:
    """The steady state; None where no window counts.

    Args:
        series: The run.
        stream: Which stream of random numbers the interval is drawn from; one for each run.
        rows: Look at these windows only.
    """
    keep = ~(series.first | series.warmup) if rows is None else rows
    windows, keep = _windows(series, keep)
    if windows is None:
        return None
    rate, kept_s, influence = middle_half(windows.rate, windows.elapsed_s)
    shares, share_columns = _shares(windows)
    columns = np.column_stack([influence, *share_columns])
    block = block_length(columns.sum(axis=1))
    raw_tps = rate if windows.knows_raw else None
    active_tps = rate * shares[0] * shares[1] if windows.knows_active else None
    knows_padding = bool(np.isfinite(windows.padded).any())
    return Steady(
        windows=int(keep.sum()),
        elapsed_s=float(windows.elapsed_s.sum()),
        per_device=windows.per_device,
        raw_tps=raw_tps,
        unpadded=shares[0] if knows_padding else None,
        unmasked=shares[1] if windows.knows_raw and windows.knows_active else None,
        active_tps=active_tps,
        mean_active_tps=float(windows.active.sum() / windows.elapsed_s.sum())
        if windows.knows_active
        else None,
        data_wait_frac=_mean(series.columns["data_wait_frac"][keep], kept_s),
        rank_imbalance=_mean(series.columns["rank_imbalance"][keep], kept_s),
        mfu=_mean(series.columns["mfu"][keep], kept_s),
        devices=_devices(series, keep),
        knows_padding=knows_padding,
        block=block,
        draws=resample(columns, block, stream),
    )


def speed(series: Series, rows: Bools) -> float | None:
    """Slots per second of some windows, as in `find_steady`; None where it is unknown."""
    windows, _ = _windows(series, rows)
    if windows is None or not windows.knows_raw:
        return None
    return middle_half(windows.rate, windows.elapsed_s)[0]


def middle_half(rate: Floats, elapsed_s: Floats) -> tuple[float, Floats, Floats]:
    """The speed in the middle half of the time: Σ tokens ÷ Σ seconds, without the extremes.

    The windows are put in order of speed; a quarter of all seconds is left out at either end. A
    window at the edge counts in part.

    Returns:
        The speed; the seconds that each window keeps; what each window adds to the speed's
        logarithm (the influence function of a trimmed mean: Huber, Robust Statistics, 1981,
        section 3.3), which sums to 0.
    """
    order = np.argsort(rate, kind="stable")
    until = np.cumsum(elapsed_s[order])
    total = until[-1]
    low, high = TRIM * total, (1 - TRIM) * total
    kept = np.minimum(until, high) - np.maximum(until - elapsed_s[order], low)
    kept_s = np.empty_like(kept)
    kept_s[order] = np.maximum(kept, 0.0)
    speed = float(rate @ kept_s / kept_s.sum())
    edges = rate[order][np.minimum(np.searchsorted(until, (low, high)), len(rate) - 1)]
    limited = np.clip(rate, *edges)
    centre = float(limited @ elapsed_s / total)
    scale = total * (1 - 2 * TRIM) * speed
    return speed, kept_s, elapsed_s * (limited - centre) / (scale if scale > 0 else 1.0)


def _windows(series: Series, keep: Bools) -> tuple[_Windows | None, Bools]:
    """The windows whose time and speed are known, over all devices or else per device."""
    elapsed_s = series.columns["elapsed_s"].astype(float)
    for suffix in ("", "_per_device"):
        raw = series.columns[f"raw_tps{suffix}"].astype(float)
        active = series.columns[f"active_tps{suffix}"].astype(float)
        knows_raw, knows_active = (bool(np.isfinite(v[keep]).any()) for v in (raw, active))
        if knows_raw or knows_active:
            break
    with np.errstate(invalid="ignore"):
        use = keep & (elapsed_s > 0)
    for rate, known in ((raw, knows_raw), (active, knows_active)):
        use = use & np.isfinite(rate) if known else use
    if not use.any() or not (knows_raw or knows_active):
        return None, use
    elapsed_s, raw, active = elapsed_s[use], raw[use], active[use]
    padded = series.columns["padded_frac"][use].astype(float) * raw * elapsed_s
    windows = _Windows(
        elapsed_s=elapsed_s,
        rate=raw if knows_raw else active,
        raw=raw * elapsed_s,
        active=active * elapsed_s,
        padded=padded,
        per_device=suffix != "",
        knows_raw=knows_raw,
        knows_active=knows_active,
    )
    return windows, use


def _shares(windows: _Windows) -> tuple[tuple[float, float], tuple[Floats, Floats]]:
    """Unpadded and unmasked, and what each window adds to their logarithms."""
    nothing = np.zeros(len(windows.rate))
    if not (windows.knows_raw and windows.knows_active):
        return (1.0, 1.0), (nothing, nothing)
    known = np.isfinite(windows.padded)
    if not known.any():
        unmasked, unmasked_by = _share(windows.active, windows.raw)
        return (1.0, unmasked), (nothing, unmasked_by)
    raw, padded, active = (
        np.where(known, v, 0.0) for v in (windows.raw, windows.padded, windows.active)
    )
    unpadded, unpadded_by = _share(raw - padded, raw)
    unmasked, unmasked_by = _share(active, raw - padded)
    return (unpadded, unmasked), (unpadded_by, unmasked_by)


def _share(part: Floats, whole: Floats) -> tuple[float, Floats]:
    """A ratio of sums, and what each window adds to its logarithm; that sums to 0."""
    parts, wholes = float(part.sum()), float(whole.sum())
    if parts <= 0 or wholes <= 0:
        return 0.0, np.zeros(len(part))
    if abs(parts / wholes - 1) < ROUNDING:
        return 1.0, np.zeros(len(part))
    return parts / wholes, part / parts - whole / wholes


def _mean(values: Floats, weights: Floats) -> float | None:
    known = np.isfinite(values)
    if not known.any() or not weights[known].sum():
        return None
    return float(np.average(values[known].astype(float), weights=weights[known]))


def _devices(series: Series, keep: Bools) -> int | None:
    """Rate of all devices ÷ rate per device; the journal's own number is the same."""
    for name in ("raw_tps", "active_tps"):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = series.columns[name][keep] / series.columns[f"{name}_per_device"][keep]
        if np.isfinite(ratio).any():
            return round(float(np.nanmedian(ratio)))
    return None

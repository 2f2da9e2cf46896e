"""A bootstrap of windows in blocks: windows that follow each other are alike.

Block length: Politis & White, Automatic block-length selection for the dependent bootstrap,
Econometric Reviews 23 (2004), with the correction of Patton, Politis & White (2009), for the
circular block bootstrap of Politis & Romano (1992).
"""

from __future__ import annotations

import math

import numpy as np

from tokrate.compare.series import Floats

RESAMPLES = 2000
MOST_BLOCKS = 200
"""More blocks make nothing surer; in a long run they are made longer instead."""
SEED = 20_250_101
"""Any number; fixed, so that the same runs give the same interval."""


def block_length(values: Floats) -> int:
    """How many windows in a row are resampled together.

    Args:
        values: What each window adds to the result, in order of time.
    """
    n = len(values)
    at_least = -(-n // MOST_BLOCKS)
    centred = values - values.mean()
    variance = float(centred @ centred) / n
    if n < 4 or variance <= 0:
        return at_least
    in_a_row = max(5, math.ceil(math.sqrt(math.log10(n))))
    most_lags = min(n - 1, math.ceil(math.sqrt(n)) + in_a_row)
    covariance = np.array([centred[: n - k] @ centred[k:] / n for k in range(most_lags + 1)])
    lags = 2 * _last_lag(covariance / variance, in_a_row, n)
    lags = min(max(lags, 1), most_lags)
    k = np.arange(1, lags + 1)
    window = np.minimum(1.0, 2 * (1 - k / lags)) if lags > 1 else np.ones(1)
    spread = variance + 2 * float(window @ covariance[1 : lags + 1])
    slope = 2 * float(window @ (k * covariance[1 : lags + 1]))
    if spread <= 0:
        return at_least
    best = (2 * slope**2 / (4 / 3 * spread**2)) ** (1 / 3) * n ** (1 / 3)
    return int(min(max(at_least, round(best)), math.ceil(min(3 * math.sqrt(n), n / 3))))


def _last_lag(correlation: Floats, in_a_row: int, n: int) -> int:
    """The lag behind which so many correlations in a row are no more than noise."""
    noise = 2 * math.sqrt(math.log10(n) / n)
    quiet = np.abs(correlation[1:]) < noise
    for lag in range(len(quiet) - in_a_row + 1):
        if quiet[lag : lag + in_a_row].all():
            return lag
    loud = np.flatnonzero(~quiet)
    return int(loud[-1]) + 1 if len(loud) else 0


def resample(columns: Floats, block: int, stream: int) -> Floats:
    """Sums over windows that were drawn anew in blocks, as deviations from the sums themselves.

    Args:
        columns: One row for each window, in order of time; every column sums to 0.
        block: Windows in a block; the last window is followed by the first.
        stream: Which of the independent streams of random numbers.

    Returns:
        One row for each resample.
    """
    n = len(columns)
    blocks = -(-n // block)
    around = np.concatenate([columns, columns[: block - 1]])
    before = np.vstack([np.zeros(columns.shape[1]), np.cumsum(around, axis=0)])
    sums = before[block:] - before[:-block]
    draw = np.random.default_rng([SEED, stream])
    chosen = draw.integers(0, n, (RESAMPLES, blocks))
    # A sum of `blocks` blocks has `blocks * block` windows.
    scale = n / (blocks * block) * _widening(n / block)
    found: Floats = sums[chosen].sum(axis=1) * scale
    return found


def _widening(blocks: float) -> float:
    """What makes up for how little few blocks tell of the spread: Student's t instead of z.

    The quantile is the expansion of Abramowitz & Stegun, 26.7.5; the root undoes that means of
    blocks lie nearer to the mean of all than to the unknown one.
    """
    z, free = 1.959964, max(1.0, blocks - 1)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return t / z * math.sqrt(1 + 1 / free)

"""The steady state, its interval, and the factors: numbers worked out by hand, then invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compare.making import Window, noisy, records, series
from tokrate.compare.blocks import block_length, resample
from tokrate.compare.factors import Ratio, compare_steady
from tokrate.compare.steady import Steady, find_steady, middle_half


def steady_of(windows: list[Window], stream: int = 0, **changes: Any) -> Steady:
    """The steady state of windows behind a first one, which never counts."""
    found = find_steady(series(records([Window(), *windows], **changes)), stream)
    assert found is not None
    return found


def ratio_of(run: Steady, base: Steady) -> Ratio:
    """The ratio of two runs that have numbers in common."""
    found = compare_steady(run, base)
    assert found is not None
    return found


# --- by hand --------------------------------------------------------------------------------------


def test_middle_half_of_four_equal_windows() -> None:
    """Of rates 1, 10, 20 and 99 in a second each, the middle two seconds hold 30 tokens."""
    speed, kept_s, influence = middle_half(np.array([99.0, 10, 1, 20]), np.ones(4))
    assert speed == 15.0
    assert kept_s.tolist() == [0, 1, 0, 1]
    assert influence.sum() == pytest.approx(0)


def test_middle_half_counts_seconds_and_not_windows() -> None:
    """One window of 6 s at rate 10, two of 1 s at 5 and 40: seconds 2 to 6 are all at 10."""
    speed, kept_s, _ = middle_half(np.array([5.0, 10, 40]), np.array([1.0, 6, 1]))
    assert speed == 10.0
    assert kept_s.tolist() == [0, 4, 0]


def test_middle_half_takes_a_part_of_a_window() -> None:
    """Of two seconds at 10 and 20, the middle second is half of each: 15."""
    speed, kept_s, _ = middle_half(np.array([10.0, 20]), np.ones(2))
    assert speed == 15.0
    assert kept_s.tolist() == [0.5, 0.5]


def test_shares_are_of_all_tokens() -> None:
    """Two windows, 1000 slots each: 600 and 400 padded, 100 and 500 active; a second each."""
    found = steady_of([Window(padded=600, active=100), Window(padded=400, active=500)])
    assert found.raw_tps == pytest.approx(1000)
    assert found.unpadded == pytest.approx(0.5)
    assert found.unmasked == pytest.approx(600 / 1000)
    assert found.active_tps == pytest.approx(300)
    assert found.mean_active_tps == pytest.approx(300)
    assert (found.windows, found.elapsed_s) == (2, pytest.approx(2))


def test_a_stall_changes_the_mean_and_not_the_steady_speed() -> None:
    """One window of 30 that takes 8 s instead of 1, which is less than a quarter of 37 s."""
    found = steady_of([Window()] * 29 + [Window(elapsed_s=8.0)])
    assert found.active_tps == pytest.approx(400)
    assert found.mean_active_tps == pytest.approx(400 * 30 / 37)


def test_first_window_and_marked_warmup_do_not_count() -> None:
    """The first window of a session never counts, a marked one neither."""
    slow = Window(elapsed_s=50.0, warmup=True)
    found = find_steady(series(records([slow, slow, Window(), Window()])), 0)
    assert found is not None
    assert found.windows == 2
    assert find_steady(series(records([Window()])), 0) is None
    assert find_steady(series(records([Window(), slow])), 0) is None


def test_factors_by_hand() -> None:
    """Half the padding, the same machine, more masking: 4/3 × 8/5 × 3/4, say."""
    base = steady_of([Window(elapsed_s=1.0, raw=1000, padded=500, active=400)] * 5)
    run = steady_of([Window(elapsed_s=0.75, raw=1000, padded=200, active=480)] * 5)
    found = ratio_of(run, base)
    assert found.ratio == pytest.approx(480 / 0.75 / 400)
    by_name = {factor.name: factor.ratio for factor in found.factors}
    assert by_name == pytest.approx({"raw": 4 / 3, "unpadded": 0.8 / 0.5, "unmasked": 0.6 / 0.8})
    assert (found.of, found.split) == ("active_tps", ())


def test_waiting_for_data_splits_raw() -> None:
    """A tenth of the time waited instead of none: busy speed is the same, fed is 0.9."""
    base = steady_of([Window(elapsed_s=0.9, wait_s=0.0)] * 5)
    run = steady_of([Window(elapsed_s=1.0, wait_s=0.1)] * 5)
    split = {factor.name: factor.ratio for factor in ratio_of(run, base).split}
    assert split == pytest.approx({"busy": 1.0, "fed": 0.9})


def test_unknown_padding_is_one_factor() -> None:
    """Without padding what is active of all slots explains what raw does not."""
    base = steady_of([Window(padded=None, active=400)] * 5)
    run = steady_of([Window(padded=100, active=600)] * 5)
    found = ratio_of(run, base)
    by_name = {factor.name: factor.ratio for factor in found.factors}
    assert by_name == pytest.approx({"raw": 1.0, "active_share": 1.5})
    assert base.unpadded is None


def test_a_fully_masked_run_has_no_ratio() -> None:
    """Nothing can be divided by a speed of 0, and no factor is made up."""
    base = steady_of([Window(active=0)] * 5)
    assert base.active_tps == 0.0
    assert compare_steady(steady_of([Window()] * 5), base) is None
    assert find_steady(series(records([Window(active=0)] * 5)), 0) is not None


# --- invariants -----------------------------------------------------------------------------------

window = st.builds(
    lambda elapsed_s, raw, unpadded, unmasked, wait: Window(
        elapsed_s=elapsed_s,
        raw=raw,
        padded=raw - max(1, round(raw * unpadded)),
        active=max(1, round(max(1, round(raw * unpadded)) * unmasked)),
        wait_s=wait * elapsed_s,
    ),
    st.floats(1e-3, 1e4),
    st.integers(1, 10**9),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 0.99),
)


@given(st.lists(window, min_size=1, max_size=20), st.lists(window, min_size=1, max_size=20))
@settings(deadline=None, max_examples=60)
def test_the_product_of_the_factors_is_the_ratio(a: list[Window], b: list[Window]) -> None:
    """To 1e-9, whatever the windows are; and busy × fed is raw."""
    run, base = steady_of(a), steady_of(b)
    found = compare_steady(run, base)
    if found is None:
        assert not (run.active_tps and base.active_tps)
        return
    assert math.prod(f.ratio for f in found.factors) == pytest.approx(found.ratio, rel=1e-9)
    raw = next(f.ratio for f in found.factors if f.name == "raw")
    assert math.prod(f.ratio for f in found.split) == pytest.approx(raw, rel=1e-9)


@given(st.floats(0.01, 100))
@settings(deadline=None, max_examples=20)
def test_speed_scales_with_the_clock(factor: float) -> None:
    """A machine that is so many times as fast is so many times as fast in the raw factor alone."""
    base = steady_of(noisy(20, 1))
    run = steady_of([Window(elapsed_s=w.elapsed_s / factor) for w in noisy(20, 1)])
    by_name = {f.name: f.ratio for f in ratio_of(run, base).factors}
    assert by_name == pytest.approx({"raw": factor, "unpadded": 1, "unmasked": 1}, rel=1e-5)


def test_a_run_against_itself_is_one() -> None:
    """Another stream of random numbers, the same run: ratio 1, inside its interval."""
    found = ratio_of(steady_of(noisy(30, 1), 0), steady_of(noisy(30, 1), 1))
    assert found.ratio == 1.0
    assert found.shows_difference is False


def test_the_interval_is_the_same_each_time() -> None:
    """Random numbers are drawn from a fixed seed."""
    a, b = steady_of(noisy(30, 1)), steady_of(noisy(30, 1))
    assert np.array_equal(a.draws, b.draws)


def test_one_window_has_no_interval() -> None:
    """There is no telling how much it varies."""
    found = ratio_of(steady_of(noisy(1)), steady_of(noisy(30)))
    assert (found.low, found.high, found.shows_difference) == (None, None, None)


# --- how sure -------------------------------------------------------------------------------------


def test_blocks_grow_with_autocorrelation() -> None:
    """White noise is resampled nearly window by window, a slow wave in long blocks."""
    draw = np.random.default_rng(0).standard_normal(400)
    slow = np.convolve(draw, np.ones(20) / 20, mode="same")
    assert block_length(draw) <= 4
    assert block_length(slow) >= 10
    assert block_length(np.zeros(400)) == 2  # no more than 200 blocks


def test_resampling_has_the_spread_of_the_mean() -> None:
    """Of independent numbers a sum spreads by the root of their number."""
    values = np.random.default_rng(1).standard_normal((400, 1))
    values -= values.mean()
    spread = resample(values, 1, 0).std()
    assert spread == pytest.approx(values.std() * math.sqrt(400), rel=0.06)


@pytest.mark.parametrize(("windows", "memory", "least"), [(20, 0.0, 0.90), (200, 0.5, 0.85)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(
    windows: int, memory: float, least: float
) -> None:
    """95 % of the intervals, less with few windows that follow each other closely."""
    hits = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        noise, level = [], 0.0
        for shock in draw.standard_normal(windows + 50):
            level = memory * level + shock * math.sqrt(1 - memory**2)
            noise.append(level)
        rate = 100 * np.exp(0.05 * np.array(noise[50:]))
        speed, _, influence = middle_half(rate, np.ones(windows))
        draws = resample(influence[:, None], block_length(influence), seed)
        low, high = np.percentile(draws, (2.5, 97.5))
        hits += low <= math.log(speed / 100) <= high
    assert least <= hits / 200 <= 0.99

"""The steady state of a session: which windows count, the median by time, bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driving import make_record
from tokrate import RunInfo, open_logger
from tokrate.steady import STEADY, SteadyWindow, SteadyWindows, steady_values, weighted_median
from toys import read_tracker

windows = st.builds(
    lambda elapsed_s, active, masked, padded: SteadyWindow(
        elapsed_s, active + masked + padded, active, padded
    ),
    elapsed_s=st.integers(1, 100).map(float),
    active=st.integers(0, 10**6),
    masked=st.integers(0, 10**6),
    padded=st.integers(0, 10**6),
)


def record_of(step: int, *, elapsed_s: float = 1.0, active: int = 4, **changes: Any) -> Any:
    """A record of 8 slots, 2 of them padded."""
    changes = {"step": step, "elapsed_s": elapsed_s, "active_tokens": active} | changes
    return make_record(**changes)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([5.0], [0.1], 5.0),
        ([9.0, 1.0, 2.0], [1.0, 1.0, 1.0], 2.0),
        ([4.0, 1.0], [1.0, 1.0], 2.5),
        ([1.0, 2.0, 9.0], [1.0, 1.0, 3.0], 9.0),
        ([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.1, 0.2], 2.5),
    ],
)
def test_weighted_median_by_hand(
    values: list[float], weights: list[float], expected: float
) -> None:
    """Half of the weight lies at or below the median, half at or above."""
    assert weighted_median(values, weights) == expected


@given(st.lists(st.integers(-1000, 1000).map(float), min_size=1))
def test_equal_weights_give_the_plain_median(values: list[float]) -> None:
    """Where all windows are of one length it is the median that everybody knows."""
    assert weighted_median(values, [0.1] * len(values)) == median(values)


@given(st.lists(windows, min_size=1, max_size=20), st.integers(2, 5))
def test_a_window_in_parts_changes_nothing(found: list[SteadyWindow], parts: int) -> None:
    """A window counts by its seconds: cut into equal parts it has the same say."""
    cut = [
        SteadyWindow(w.elapsed_s, w.raw_tokens, w.active_tokens, w.padded_tokens)
        for w in found
        for _ in range(parts)
    ]
    assert steady_values(cut) == steady_values(found)


def test_warmup_and_windows_without_speed_do_not_count() -> None:
    """The first windows, and those that took no time, are left out."""
    steady = SteadyWindows()
    steady.add(record_of(1, active=1000, warmup=True))
    steady.add(record_of(2, elapsed_s=0.0, active_tps=None))
    assert (steady.last_step, steady.values()) == (None, {})
    steady.add(record_of(3, elapsed_s=2.0))
    assert steady.last_step == 3
    assert steady.values() == {
        "steady_active_tps": 2.0,
        "steady_raw_tps": 4.0,
        "steady_padded_frac": 0.25,
        "steady_masked_frac": 0.25,
    }


def test_unknown_padding_is_left_out() -> None:
    """Speeds are known without padding, the fractions are not; empty windows have none either."""
    steady = SteadyWindows()
    steady.add(record_of(1, padded_tokens=None))
    assert set(steady.values()) == {"steady_active_tps", "steady_raw_tps"}
    steady.add(record_of(2, raw_tokens=0, active=0, padded_tokens=0))
    assert set(steady.values()) == {"steady_active_tps", "steady_raw_tps"}
    steady.add(record_of(3))
    assert steady.values()["steady_padded_frac"] == 0.25


@given(st.lists(windows, min_size=1, max_size=200), st.sampled_from([2, 4, 8]))
def test_memory_is_bounded_and_no_token_is_lost(found: list[SteadyWindow], most: int) -> None:
    """However many windows there are, few are kept, and their sums are those of all."""
    steady = SteadyWindows(most)
    for step, window in enumerate(found):
        elapsed_s, raw, active, padded = window
        changes = {"raw_tokens": raw, "padded_tokens": padded}
        steady.add(record_of(step, elapsed_s=elapsed_s, active=active, **changes))
    kept = [*steady._windows, *([steady._open] if steady._open else [])]
    assert len(kept) <= most
    assert [sum(w[i] or 0 for w in kept) for i in range(4)] == [
        sum(w[i] or 0 for w in found) for i in range(4)
    ]


def test_merged_windows_are_still_near_the_median() -> None:
    """Ten thousand windows with one long stall: the stall does not show in the steady speed."""
    steady = SteadyWindows(64)
    for step in range(10_000):
        stall = 5000 <= step < 5100
        steady.add(record_of(step, active=1 if stall else 4 + step % 2, raw_tokens=8))
    assert steady.values()["steady_active_tps"] == pytest.approx(4.5, rel=0.02)


def test_the_summary_reaches_journal_and_trackers(tmp_path: Path) -> None:
    """At close the values go out at the last steady step, under our own keys, as no entry."""
    spec = {"console": False, "toys:FileTracker": {"path": str(tmp_path / "out")}}
    with open_logger(spec, run=RunInfo("a"), dir=tmp_path) as logger:
        logger.log(record_of(1, active=1000, warmup=True))
        for step in (2, 3, 4):
            logger.log(record_of(step, active=step))
        logger.log_metrics({"loss": 1.0, "throughput/steady_raw_tps": 9.9}, step=5)
    lines = [json.loads(x) for x in (tmp_path / "a" / "journal.jsonl").read_text().splitlines()]
    summary = lines[-2]
    assert (summary["kind"], summary["step"]) == ("summary", 4)
    assert list(summary["metrics"]) == [f"throughput/{name}" for name in STEADY]
    assert summary["metrics"]["throughput/steady_active_tps"] == 3.0
    stats = logger.stats()
    assert stats.left_out == {"name": 1}, "the keys are ours"
    assert (stats.entries, stats.backends["toys:FileTracker"].delivered) == (5, 5)
    assert read_tracker(tmp_path / "out")[0] == [1, 2, 3, 4, 5, 4]


def test_nothing_steady_writes_no_summary(tmp_path: Path) -> None:
    """A run that logged no record, or warm-up alone, has no steady state."""
    with open_logger({"console": False}, run=RunInfo("a"), dir=tmp_path) as logger:
        logger.log(record_of(1, warmup=True))
        logger.log_metrics({"loss": 1.0}, step=2)
    assert "summary" not in (tmp_path / "a" / "journal.jsonl").read_text()


def test_the_summary_survives_an_outage(tmp_path: Path) -> None:
    """A tracker that is down at close gets the steady values by `tokrate sync`."""
    from tokrate.sync import sync_run

    (tmp_path / "out.down").touch()
    spec = {"console": False, "toys:FileTracker": {"path": str(tmp_path / "out")}}
    logger = open_logger(spec, run=RunInfo("a"), dir=tmp_path, close_timeout_s=0.1)
    logger.log(record_of(1))
    logger.close()
    (tmp_path / "out.down").unlink()
    sync_run(tmp_path / "a")
    lines = [json.loads(x) for x in (tmp_path / "out").read_text().splitlines()]
    metrics = [line["metrics"] for line in lines if "metrics" in line]
    assert metrics[-1]["throughput/steady_active_tps"] == 4.0
    assert len(metrics) == 2

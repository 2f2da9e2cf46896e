"""What holds for all windows, ranks and restarts, tried on many."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driving import Clock
from gathered import record_of_ranks
from tokrate import ThroughputMeter, ThroughputRecord, TokenCounts

quick = settings(max_examples=60, deadline=None)


# --- windows -------------------------------------------------------------------------------------

counts = st.builds(
    lambda active, masked, padded: TokenCounts(active + masked + padded, active, padded),
    *[st.integers(0, 2**40)] * 3,
)
maybe_counts = st.one_of(counts, counts.map(lambda c: replace(c, padded=None)))
seconds = st.floats(0.001, 1e5)
OPTIONS = {"flops_per_token": 6e9, "peak_flops": 1e15}


def window(batches: list[TokenCounts], duration: float, **more: Any) -> ThroughputRecord:
    """The record of one window."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock, **OPTIONS)
    for batch in batches:
        meter.add(batch)
    clock.now += duration
    return replace(meter.record(1), time_unix_ms=0, **more)


@quick
@given(st.lists(maybe_counts, max_size=6), seconds, st.data())
def test_order_of_batches_never_matters(
    batches: list[TokenCounts], duration: float, data: st.DataObject
) -> None:
    """Any order of the batches of a window gives the same record, to the last bit."""
    shuffled = data.draw(st.permutations(batches))
    assert window(shuffled, duration) == window(batches, duration)


@quick
@given(counts, counts, seconds)
def test_one_batch_or_two_in_a_window(
    one: TokenCounts, other: TokenCounts, duration: float
) -> None:
    """A batch that was cut in two gives the record of the whole."""
    assert window([one, other], duration) == window([one + other], duration)


@quick
@given(st.lists(counts, max_size=4), st.lists(st.tuples(seconds, seconds), max_size=4))
def test_phases_anywhere_change_nothing_but_the_pause(
    batches: list[TokenCounts], phases: list[tuple[float, float]]
) -> None:
    """However many phases lie in a window: its record is that without them, and they are said."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock, **OPTIONS)
    for batch in batches:
        meter.add(batch)
    for training, pause in phases:
        clock.now += training
        with meter.phase("eval"):
            meter.add(TokenCounts(99, 9, 9))
            clock.now += pause
    record = meter.record(1)
    alone = window(batches, sum(training for training, _ in phases))
    assert record.paused_s == pytest.approx(sum(pause for _, pause in phases))
    assert record.elapsed_s == pytest.approx(alone.elapsed_s, abs=1e-9)
    assert (record.raw_tokens, record.active_tokens, record.padded_tokens) == (
        (alone.raw_tokens, alone.active_tokens, alone.padded_tokens)
    )
    assert (record.padded_frac, record.masked_frac) == (alone.padded_frac, alone.masked_frac)


RATES = ("raw_tps", "active_tps", "raw_tps_per_device", "active_tps_per_device", "mfu")


@quick
@given(st.lists(maybe_counts, max_size=4), seconds, st.sampled_from([0.25, 2.0, 1024.0]))
def test_every_rate_scales_with_the_clock(
    batches: list[TokenCounts], duration: float, factor: float
) -> None:
    """Twice the time is half of every rate, and nothing else changes (a power of 2: exactly)."""
    fast, slow = window(batches, duration), window(batches, duration * factor)
    for name in RATES:
        rate = getattr(slow, name)
        assert getattr(fast, name) == (None if rate is None else rate * factor)
    unchanged = {name: getattr(fast, name) for name in RATES}
    times = {"elapsed_s": fast.elapsed_s, "total_elapsed_s": fast.total_elapsed_s}
    assert replace(slow, **unchanged, **times) == fast


# --- ranks ---------------------------------------------------------------------------------------


def rank_of(counts: TokenCounts, elapsed_s: float) -> dict[str, Any]:
    """What one rank counted in its time."""
    return {
        "raw": counts.raw,
        "active": counts.active,
        "padded": counts.padded,
        "elapsed_s": elapsed_s,
    }


ranks = st.builds(rank_of, maybe_counts, seconds)


def joined(reports: list[dict[str, Any]], **layout: Any) -> ThroughputRecord:
    """The record of all ranks, without the time of day."""
    return replace(record_of_ranks(reports, **layout, **OPTIONS), time_unix_ms=0)


@quick
@given(st.lists(ranks, min_size=1, max_size=6), st.data())
def test_order_of_ranks_never_matters(reports: list[Any], data: st.DataObject) -> None:
    """Any order of the ranks gives the same record, to the last bit."""
    assert joined(data.draw(st.permutations(reports))) == joined(reports)


@quick
@given(st.lists(ranks, min_size=1, max_size=4), st.integers(1, 4), st.booleans())
def test_replicas_of_copies_are_one(reports: list[Any], copies: int, blocks: bool) -> None:
    """k ranks for each batch and `replicas=k` give the record of one rank for each."""
    copied = [r for r in reports for _ in range(copies)] if blocks else reports * copies
    one = joined(reports, devices=8)
    assert joined(copied, replicas=copies, devices=8) == one


@quick
@given(st.lists(counts, min_size=1, max_size=6), seconds, st.data())
def test_ranks_may_be_cut_anywhere(
    batches: list[TokenCounts], duration: float, data: st.DataObject
) -> None:
    """However the batches lie on the ranks, all but the imbalance is the record of one rank."""
    places = data.draw(st.lists(st.integers(0, 2), min_size=len(batches), max_size=len(batches)))
    sums = [TokenCounts(0, 0, 0)] * 3
    for place, batch in zip(places, batches, strict=True):
        sums[place] += batch
    spread = joined([rank_of(each, duration) for each in sums], devices=1)
    whole = window(batches, duration)
    assert replace(spread, rank_imbalance=whole.rank_imbalance) == whole
    if whole.raw_tokens:
        assert spread.rank_imbalance == max(s.raw for s in sums) * 3 / whole.raw_tokens


@quick
@given(st.lists(ranks, min_size=1, max_size=5), st.integers(1, 2))
def test_identity_holds_over_ranks(reports: list[Any], copies: int) -> None:
    """active_tps is raw_tps less its padded and masked share, up to rounding; all are in range."""
    record = joined(reports * copies, replicas=copies)
    if record.padded_frac is None:
        assert record.masked_frac is None
        assert record.padded_tokens is record.mfu is None or record.raw_tokens == 0
        return
    share = 1 - record.padded_frac - record.masked_frac
    rounding = 4 * sys.float_info.epsilon * record.raw_tps
    assert abs(record.active_tps - record.raw_tps * share) <= rounding
    assert record.active_tokens + record.masked_tokens + record.padded_tokens == record.raw_tokens
    assert 0 <= record.padded_frac <= 1
    assert 0 <= record.masked_frac <= 1
    assert record.rank_imbalance >= 1


# --- restarts ------------------------------------------------------------------------------------


@quick
@given(st.lists(st.tuples(counts, seconds), max_size=4), counts, seconds)
def test_state_goes_through_any_checkpoint(
    windows: list[tuple[TokenCounts, float]], opened: TokenCounts, duration: float
) -> None:
    """A state is plain numbers, comes back from JSON and from torch, and holds the open window."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    for step, (batch, elapsed) in enumerate(windows, start=1):
        meter.add(batch)
        clock.now += elapsed
        meter.record(step)
    meter.add(opened)
    clock.now += duration
    state = meter.state_dict()
    assert {type(value) for value in state.values()} == {int, float}
    through_json = json.loads(json.dumps(state))
    through_torch = {
        name: torch.tensor(v, dtype=torch.float64 if name[-2:] == "_s" else None)
        for name, v in state.items()
    }
    for each in (through_json, through_torch):
        resumed = ThroughputMeter(clock=clock)
        resumed.load_state_dict(each)
        assert resumed.state_dict() == state | {"session": state["session"] + 1}
    assert state["total_raw_tokens"] == sum(b.raw for b, _ in windows) + opened.raw


@quick
@given(st.lists(st.tuples(counts, seconds), min_size=1, max_size=6), st.data())
def test_restarts_anywhere_change_no_total(
    windows: list[tuple[TokenCounts, float]], data: st.DataObject
) -> None:
    """A run restarted between any of its windows ends with the totals of one that was not."""
    clocks = Clock(), Clock()
    steady, restarted = (ThroughputMeter(clock=clock) for clock in clocks)
    for step, (batch, elapsed) in enumerate(windows, start=1):
        if data.draw(st.booleans()):
            state = restarted.state_dict()
            clocks[1].now += 1000.0  # the machine is down
            restarted = ThroughputMeter(clock=clocks[1])
            restarted.load_state_dict(state)
        for meter, clock in zip((steady, restarted), clocks, strict=True):
            meter.add(batch)
            clock.now += elapsed
        one, other = steady.record(step), restarted.record(step)
        assert other.raw_tps == pytest.approx(one.raw_tps)
        assert (other.total_raw_tokens, other.total_active_tokens) == (
            one.total_raw_tokens,
            one.total_active_tokens,
        )
        assert other.total_elapsed_s == pytest.approx(one.total_elapsed_s)

"""The meter: sums over a window divided by the time of that window."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driving import Clock, drive, load_cases
from tokrate import ThroughputMeter, TokenCounts
from tokrate.errors import CountingError, MeterError, StateError

GOOD = {"labels": [[-100, 5, 6]], "attention_mask": [[1, 1, 1]]}
CONTRADICTORY = {"labels": [[4, 5, 6]], "attention_mask": [[1, 0, 0]]}


@pytest.mark.parametrize("case", load_cases("meter"), ids=lambda case: case["id"])
def test_shared_case(case: dict[str, Any]) -> None:
    """Each public case gives its numbers."""
    clock = Clock()
    drive(ThroughputMeter(clock=clock, **case["meter"]), clock, case["events"])


windows = st.lists(
    st.tuples(
        st.lists(st.tuples(*[st.integers(0, 2**33)] * 3), max_size=5),
        st.floats(0.001, 1e5),
    ),
    min_size=1,
    max_size=5,
)


def played(windows: list[Any], factor: float = 1.0) -> list[Any]:
    """Records of a meter that saw these windows, with time stretched by a factor."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    records = []
    for step, (batches, seconds) in enumerate(windows, start=1):
        for active, masked, padded in batches:
            meter.add(TokenCounts(active + masked + padded, active, padded))
        clock.now += seconds * factor
        records.append(meter.record(step))
    return records


@given(windows)
def test_identity_of_the_record(windows: list[Any]) -> None:
    """active_tps is raw_tps less its padded and masked share, in every record."""
    for record in played(windows):
        if record.padded_frac is not None:
            share = 1 - record.padded_frac - record.masked_frac
            assert math.isclose(
                record.active_tps,
                record.raw_tps * share,
                rel_tol=1e-9,
                abs_tol=record.raw_tps * 1e-12,
            )


@given(windows)
def test_splitting_windows_changes_no_total(windows: list[Any]) -> None:
    """One window or many: totals are the same."""
    whole = played([([b for batches, _ in windows for b in batches], sum(s for _, s in windows))])
    parts = played(windows)
    assert parts[-1].total_raw_tokens == whole[-1].total_raw_tokens
    assert parts[-1].total_active_tokens == whole[-1].total_active_tokens
    assert math.isclose(parts[-1].total_elapsed_s, whole[-1].total_elapsed_s, rel_tol=1e-6)


@given(windows, st.sampled_from([0.5, 2.0, 1024.0]))
def test_rates_scale_with_the_clock(windows: list[Any], factor: float) -> None:
    """Twice the time is half the rate."""
    for one, other in zip(played(windows), played(windows, factor), strict=True):
        assert math.isclose(one.raw_tps, other.raw_tps * factor, rel_tol=1e-6)


def test_phases_nest_and_survive_exceptions() -> None:
    """The outermost phase counts, also when what is inside fails."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    clock.now = 1.0
    with pytest.raises(RuntimeError), meter.phase("eval"):
        clock.now = 3.0
        with meter.phase("checkpoint"):
            clock.now = 4.0
        raise RuntimeError
    clock.now = 5.0
    record = meter.record(1)
    assert (record.elapsed_s, record.paused_s) == (2.0, 3.0)


def test_record_closed_inside_a_phase() -> None:
    """A phase that is open when the window closes belongs to both windows, each to its part."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    clock.now = 2.0
    with meter.phase("eval"):
        clock.now = 5.0
        first = meter.record(1)
        clock.now = 6.0
    clock.now = 8.0
    second = meter.record(2)
    assert (first.elapsed_s, first.paused_s) == (2.0, 3.0)
    assert (second.elapsed_s, second.paused_s) == (2.0, 1.0)


def test_waiting_for_data() -> None:
    """The wait for each batch is measured, batches come through, phases stay out."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)

    def slow_loader() -> Any:
        for batch in range(3):
            clock.now += 0.5
            yield batch

    seen = []
    for batch in meter.watch(slow_loader()):
        seen.append(batch)
        clock.now += 1.0
    record = meter.record(3)
    assert seen == [0, 1, 2]
    assert record.data_wait_s == 1.5
    assert record.data_wait_frac == 1.5 / 4.5
    assert meter.record(4).data_wait_s is None


def test_watched_loader_has_its_length() -> None:
    """Progress bars ask a loader for its length; one without still has none."""
    meter = ThroughputMeter()
    assert len(meter.watch([1, 2])) == 2
    with pytest.raises(TypeError):
        len(meter.watch(iter([1, 2])))


def test_warmup_windows_are_marked() -> None:
    """The first windows are logged and marked."""
    meter = ThroughputMeter(clock=Clock(), warmup_windows=2)
    assert [meter.record(step).warmup for step in (1, 2, 3)] == [True, True, False]


def test_mfu_only_from_given_numbers() -> None:
    """mfu counts tokens that are no padding, and is unknown without both numbers."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock, flops_per_token=10.0, peak_flops=100.0)
    meter.add(TokenCounts(8, 4, 2))
    clock.now = 2.0
    assert meter.record(1).mfu == 6 / 2.0 * 10.0 / 100.0
    assert ThroughputMeter(clock=clock, flops_per_token=10.0).record(1).mfu is None
    with pytest.raises(MeterError, match="peak_flops"):
        ThroughputMeter(peak_flops=0.0)


@pytest.mark.parametrize(
    "options", [{"warmup_windows": -1}, {"flops_per_token": math.inf}, {"ignore_index": "x"}]
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    """A meter that could only give wrong numbers is refused when it is made."""
    with pytest.raises((MeterError, CountingError), match="expected"):
        ThroughputMeter(**options)


def test_adding_what_is_no_count() -> None:
    """`add` takes counts; a batch belongs into `update`."""
    with pytest.raises(CountingError, match="TokenCounts"):
        ThroughputMeter().add({"raw": 8})  # type: ignore[arg-type]


def test_steps_of_a_window() -> None:
    """With a record every ten steps, and a short last window, steps are counted."""
    meter = ThroughputMeter(clock=Clock())
    assert [meter.record(step).steps for step in (10, 20, 23)] == [10, 10, 3]


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_step_that_is_no_step(step: Any) -> None:
    """A step is a whole number of at least 0."""
    with pytest.raises(MeterError, match="number of optimizer steps"):
        ThroughputMeter().record(step)


def test_step_that_goes_back() -> None:
    """Steps never go back within a run, and the refused call changes nothing."""
    meter = ThroughputMeter(clock=Clock())
    meter.add(TokenCounts(8, 4, 2))
    meter.record(5)
    meter.add(TokenCounts(8, 4, 2))
    with pytest.raises(MeterError, match="load_state_dict"):
        meter.record(4)
    assert meter.record(6).total_raw_tokens == 16


def test_contradiction_in_the_first_window_raises() -> None:
    """A batch that contradicts itself fails early, when training has just begun."""
    with pytest.raises(CountingError, match="at once"):
        ThroughputMeter().update(**CONTRADICTORY)


def test_contradiction_later_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Later it must not end a run of hours: fractions become None and training goes on."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    meter.update(**GOOD)
    clock.now = 1.0
    meter.record(1)
    too_many = {"labels": [[1, 2, 3]], "cu_seqlens": [0, 1]}
    for _ in range(2):
        meter.update(**too_many)
    clock.now = 2.0
    record = meter.record(2)
    assert (record.raw_tokens, record.active_tokens, record.raw_tps) == (6, 4, 6.0)
    assert record.padded_frac is record.masked_frac is record.padded_tokens is None
    assert len([r for r in caplog.records if "do not fit" in r.message]) == 1
    meter.update(**GOOD)
    clock.now = 3.0
    assert meter.record(3).padded_frac == 0.0


def test_batch_that_cannot_be_counted_later(caplog: pytest.LogCaptureFixture) -> None:
    """A batch without targets makes the rates of its window unknown, not wrong."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    meter.record(1)
    meter.update(input_ids=[[1, 2]])
    clock.now = 1.0
    record = meter.record(2)
    assert record.raw_tps is record.active_tps is record.padded_frac is None


@pytest.mark.parametrize("strict", [True, False])
def test_strict_decides(strict: bool) -> None:
    """strict=True always raises, strict=False never."""
    meter = ThroughputMeter(strict=strict)
    if strict:
        meter.record(1)
        with pytest.raises(CountingError):
            meter.update(**CONTRADICTORY)
    else:
        meter.update(**CONTRADICTORY)
        assert meter.record(1).padded_frac is None


def test_unknown_padding_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without a source of padding the fractions are left out, and the argument is named."""
    caplog.set_level(logging.WARNING)
    meter = ThroughputMeter(clock=Clock())
    for step in (1, 2):
        meter.update([[1, 2, 3]])
        meter.record(step)
    assert [r.message.count("attention_mask=") for r in caplog.records] == [1]


def test_clock_that_runs_backwards(caplog: pytest.LogCaptureFixture) -> None:
    """In the first window it is an error that changes nothing; later it is said, rates are None."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    meter.add(TokenCounts(8, 4, 2))
    clock.now = -1.0
    with pytest.raises(MeterError, match="ran backwards"):
        meter.record(1)
    clock.now = 1.0
    assert meter.record(1).total_raw_tokens == 8
    meter.add(TokenCounts(8, 4, 2))
    clock.now = 0.5
    record = meter.record(2)
    assert record.raw_tps is None
    assert record.total_elapsed_s == 1.0
    assert "ran backwards" in caplog.text


@given(windows, windows)
def test_state_goes_on(before: list[Any], after: list[Any]) -> None:
    """A meter restored from its state ends with the totals of one that never stopped."""
    clock = Clock()
    first = ThroughputMeter(clock=clock)
    whole = played(before + after)
    _play(first, clock, before, start=1)
    state = json.loads(json.dumps(first.state_dict()))
    second = ThroughputMeter(clock=clock)
    second.load_state_dict(state)
    last = _play(second, clock, after, start=len(before) + 1)
    assert last.session == 2
    assert last.warmup is (len(after) == 1)
    assert last.total_raw_tokens == whole[-1].total_raw_tokens
    assert last.total_active_tokens == whole[-1].total_active_tokens
    assert math.isclose(last.total_elapsed_s, whole[-1].total_elapsed_s, rel_tol=1e-6)


def _play(meter: ThroughputMeter, clock: Clock, windows: list[Any], start: int) -> Any:
    for step, (batches, seconds) in enumerate(windows, start=start):
        for active, masked, padded in batches:
            meter.add(TokenCounts(active + masked + padded, active, padded))
        clock.now += seconds
        record = meter.record(step)
    return record


def test_state_holds_the_open_window() -> None:
    """A checkpoint between two records loses nothing of one process."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    meter.add(TokenCounts(8, 4, 2))
    clock.now = 2.0
    state = meter.state_dict()
    assert (state["total_raw_tokens"], state["total_elapsed_s"]) == (8, 2.0)


def test_resume_at_an_earlier_step() -> None:
    """After load_state_dict the step may be smaller than the last one before the crash."""
    meter = ThroughputMeter(clock=Clock())
    meter.record(10)
    state = meter.state_dict()
    meter.record(20)
    resumed = ThroughputMeter(clock=Clock())
    resumed.load_state_dict(state)
    assert resumed.record(11).steps == 1


@pytest.mark.parametrize(
    "state", [{"version": 99}, {}, {"version": 1}, {"version": 1, "step": "x"}]
)
def test_state_that_cannot_be_loaded(state: dict[str, Any]) -> None:
    """A newer or damaged state is refused and changes nothing."""
    meter = ThroughputMeter(clock=Clock())
    meter.add(TokenCounts(8, 4, 2))
    before = meter.state_dict()
    with pytest.raises(StateError, match="expected"):
        meter.load_state_dict(state)
    assert meter.state_dict() == before

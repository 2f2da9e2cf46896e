"""Restarts: totals go into any checkpoint and continue; what is no state changes nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from driving import Clock
from tokrate import ThroughputMeter, TokenCounts
from tokrate.errors import CountingError, MeterError, StateError

State = dict[str, int | float]


def make_meter(**options: Any) -> tuple[ThroughputMeter, Clock]:
    """A meter and its clock."""
    clock = Clock()
    return ThroughputMeter(clock=clock, **options), clock


def trained() -> ThroughputMeter:
    """A meter after two windows: 3 x 8 slots, 4 s, 10 steps."""
    meter, clock = make_meter()
    for step, batches, seconds in ((5, 2, 3.0), (10, 1, 1.0)):
        for _ in range(batches):
            meter.add(TokenCounts(8, 4, 2))
        clock.now += seconds
        meter.record(step)
    return meter


TRAINED: State = {
    "version": 1,
    "session": 1,
    "step": 10,
    "total_raw_tokens": 24,
    "total_active_tokens": 12,
    "total_elapsed_s": 4.0,
}


def through_torch(state: State) -> Any:
    """Saved and loaded the safe way, which admits plain values only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_json(state: State) -> Any:
    """As text."""
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("through", [through_torch, through_json])
def test_state_is_plain_numbers(through: Callable[[State], Any]) -> None:
    """It comes back from a checkpoint as it was, in type and value."""
    state = trained().state_dict()
    assert state == TRAINED
    assert {type(value) for value in state.values()} == {int, float}
    back = through(state)
    assert back == state
    assert [type(value) for value in back.values()] == [type(value) for value in state.values()]


def test_totals_and_clock_continue() -> None:
    """Totals go on where they were; rates and steps are of this session; session counts up."""
    meter, clock = make_meter()
    clock.now = 1000.0  # another process, another clock
    meter.load_state_dict(TRAINED)
    meter.add(TokenCounts(8, 4, 2))
    clock.now += 2.0
    record = meter.record(12)
    assert (record.total_raw_tokens, record.total_active_tokens) == (32, 16)
    assert (record.total_elapsed_s, record.elapsed_s) == (6.0, 2.0)
    assert (record.raw_tps, record.steps, record.session) == (4.0, 2, 2)
    assert record.warmup


def test_sessions_add_up() -> None:
    """Each restart counts one on, whatever happened in between."""
    state = TRAINED
    for session in (2, 3, 4):
        meter, _ = make_meter()
        meter.load_state_dict(state)
        state = meter.state_dict()
        assert state["session"] == session


def test_what_came_before_the_load_is_forgotten() -> None:
    """A batch counted and time passed before the checkpoint was loaded are in no window."""
    meter, clock = make_meter()
    meter.add(TokenCounts(8, 4, 2))
    clock.now = 5.0
    meter.load_state_dict(TRAINED)
    clock.now = 6.0
    record = meter.record(11)
    assert (record.raw_tokens, record.elapsed_s, record.total_raw_tokens) == (0, 1.0, 24)


def test_open_window_is_saved() -> None:
    """On one rank a checkpoint in the middle of a window loses nothing."""
    meter, clock = make_meter()
    meter.add(TokenCounts(8, 4, 2))
    clock.now = 2.0
    state = meter.state_dict()
    assert (state["total_raw_tokens"], state["total_elapsed_s"]) == (8, 2.0)
    assert meter.record(1).total_raw_tokens == 8  # and is not counted twice


def test_rollback_is_allowed_when_declared() -> None:
    """A smaller step than before is an error, unless a checkpoint of that step was loaded."""
    meter, _ = make_meter()
    meter.record(20)
    with pytest.raises(MeterError, match=r"record\(step=11\) after record\(step=20\)"):
        meter.record(11)
    meter.load_state_dict(TRAINED)
    assert meter.record(11).steps == 1


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (TRAINED | {"version": 2}, "version 2: expected 1; load it with the tokrate that wrote it"),
        ({}, "version None: expected 1"),
        (None, "version None: expected 1"),
        ({"version": 1, "session": 1}, "cannot be read"),
        (TRAINED | {"step": 1.5}, "cannot be read"),
        (TRAINED | {"total_elapsed_s": "long"}, "cannot be read"),
        (TRAINED | {"total_raw_tokens": -1}, "at least 0"),
        (TRAINED | {"total_elapsed_s": float("nan")}, "finite"),
    ],
)
def test_what_is_no_state_changes_nothing(state: Any, words: str) -> None:
    """It is refused with what was found and expected; the meter is as it was."""
    meter = trained()
    with pytest.raises(StateError, match=words):
        meter.load_state_dict(state)
    assert meter.state_dict() == TRAINED


def test_backward_clock() -> None:
    """In the first window it is an error, and totals stay; later it is a record without rates."""
    meter, clock = make_meter()
    meter.add(TokenCounts(8, 4, 2))
    clock.now = -1.0
    with pytest.raises(MeterError, match="the clock ran backwards: -1 s since the window began"):
        meter.record(1)
    assert meter.state_dict()["total_elapsed_s"] == 0.0
    clock.now = 2.0
    assert meter.record(1).raw_tps == 4.0
    meter.add(TokenCounts(8, 4, 2))
    clock.now = 1.0
    record = meter.record(2)
    assert (record.raw_tps, record.total_raw_tokens, record.total_elapsed_s) == (None, 16, 2.0)


def test_backward_clock_within_a_phase() -> None:
    """Negative time of a phase does not turn into time of training."""
    meter, clock = make_meter()
    with meter.phase("eval"):
        clock.now = -10.0
    clock.now = -9.0
    with pytest.raises(MeterError, match="the clock ran backwards: -10 s"):
        meter.record(1)


def test_contradiction_leaves_totals_untouched() -> None:
    """A record that is refused for its counts can be told apart from one that was made."""
    meter, clock = make_meter(strict=True)
    clock.now = 1.0
    with pytest.raises(CountingError):
        meter.update([[1, 2, 3]], attention_mask=[[1, 1, 0]])
    assert meter.state_dict()["total_raw_tokens"] == 0
    assert meter.record(1).raw_tokens == 0

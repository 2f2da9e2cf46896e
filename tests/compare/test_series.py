"""Which windows count: the newest for each step, and where sessions begin."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compare.making import START_MS, Window, records, series, write_journal
from tokrate.compare.series import Points, newest
from tokrate.compare.sources import read_source


def points(*rows: tuple[int, int, float]) -> Points:
    """Points from (step, time, value)."""
    step, time_ms, value = zip(*rows, strict=True)
    return Points(np.array(step, np.int64), np.array(time_ms, np.int64), np.array(value, float))


def test_the_newest_point_of_a_step_wins() -> None:
    """By time, in whichever order the points come."""
    found = newest(points((2, 50, 2.5), (1, 10, 1.0), (2, 20, 2.0)))
    assert found.step.tolist() == [1, 2]
    assert found.value.tolist() == [1.0, 2.5]


def test_going_back_voids_what_lies_behind() -> None:
    """After a restart from step 2, the old steps 3 and 5 are void although only 4 is done anew."""
    found = newest(points((1, 1, 0), (2, 2, 0), (3, 3, 0), (5, 4, 0), (3, 9, 1), (4, 10, 1)))
    assert list(zip(found.step.tolist(), found.value.tolist(), strict=True)) == [
        (1, 0), (2, 0), (3, 1), (4, 1),
    ]  # fmt: skip


def test_a_point_that_was_written_twice_is_one() -> None:
    """A retry repeats step and time, and is no restart."""
    found = series(records([Window()] * 3) * 2)
    assert found.step.tolist() == [1, 2, 3]
    assert found.sessions == 1


def test_the_total_tells_what_was_done_anew() -> None:
    """Where the new session's windows close at other steps, only the running total falls back."""
    first = records([Window()] * 4, every=2)  # steps 1 3 5 7, totals 400 800 1200 1600
    second = records([Window()] * 3, first_step=6, every=2, total=800, start_ms=START_MS + 60_000)
    found = series(first + second)
    assert found.step.tolist() == [1, 3, 6, 8, 10]
    assert found.step[found.first].tolist() == [1, 6]


def test_a_total_that_began_anew_voids_nothing() -> None:
    """A meter whose state was not in the checkpoint counts from 0 again."""
    first = records([Window()] * 3)
    second = records([Window()] * 3, first_step=4, start_ms=START_MS + 60_000)
    assert series(first + second).step.tolist() == [1, 2, 3, 4, 5, 6]


def test_the_journal_knows_sessions_without_overlap(tmp_path: Path) -> None:
    """A restart right at the last record leaves no trace but the journal's own line."""
    folder = tmp_path / "a"
    write_journal(folder, records([Window()] * 3), outcome=None)
    second = records([Window()] * 3, first_step=4, total=1200, start_ms=START_MS + 60_000)
    write_journal(folder, second, resume_step=3)
    (found,) = read_source(str(folder))
    assert found.step[found.first].tolist() == [1, 4]
    assert found.facts.outcome == "finished"


def test_the_journal_voids_by_the_checkpoint(tmp_path: Path) -> None:
    """A new session's `resume_step` voids later entries before it, whatever their totals say."""
    folder = tmp_path / "a"
    write_journal(folder, records([Window()] * 5), outcome="killed")
    write_journal(
        folder, records([Window()], first_step=9, start_ms=START_MS + 60_000), resume_step=2
    )
    (found,) = read_source(str(folder))
    assert found.step.tolist() == [1, 2, 9]


def test_everything_is_float32() -> None:
    """The precision of the poorest tracker, so that all sources give the same to the last bit."""
    found = series(records([Window(elapsed_s=1 / 3)] * 2))
    assert {values.dtype for values in found.columns.values()} == {np.dtype(np.float32)}
    assert found.columns["raw_tps"][0] == np.float32(1000 / (1 / 3))


def test_a_start_between_two_times_is_where_the_pause_is() -> None:
    """A tracker that was reached late, or was handed what the session before had left."""
    one = records([Window()] * 4)
    two = records([Window()] * 3, first_step=5, total=1600, start_ms=START_MS + 60_000)
    begun = ((one[2].time_unix_ms, two[1].time_unix_ms - 500),)
    found = series(one + two, starts_ms=begun)
    assert found.step[found.first].tolist() == [1, 5]


def test_a_start_behind_everything_is_a_late_delivery() -> None:
    """`tokrate sync` opens the tracker long after the run: no session began there."""
    found = records([Window()] * 4)
    late = ((found[1].time_unix_ms, found[-1].time_unix_ms + 10**6),)
    assert series(found, starts_ms=late).sessions == 1

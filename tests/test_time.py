"""Time in real loops: accumulation, windows of several steps, loaders, phases, utilisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from driving import Clock
from gathered import record_of_ranks
from tokrate import RankLayout, ThroughputMeter, ThroughputRecord, TokenCounts

STEP_S = 2.0
WAIT_S = 0.5


class Stream(IterableDataset[torch.Tensor]):
    """Rows of 5 tokens without an end that anybody knows; each takes a while to come."""

    def __init__(self, rows: int, clock: Clock | None = None) -> None:
        self.rows = rows
        self.clock = clock

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(self.rows):
            if self.clock is not None:
                self.clock.now += WAIT_S
            yield torch.arange(row, row + 5)


class Rows(Dataset[torch.Tensor]):
    """Ten rows of 5 tokens."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.arange(row, row + 5)


# --- accumulation and windows of several steps ---------------------------------------------------


def train(
    micro_batches: int, accumulate: int, log_every: int
) -> tuple[ThroughputMeter, list[ThroughputRecord]]:
    """A loop as people write them: 8 slots, 4 targets, 2 of padding, 1 s per micro-batch."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock, labels_aligned=True)
    labels = torch.tensor([[-100, -100, 5, 6], [7, 8, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    records, step = [], 0
    for micro_batch in range(1, micro_batches + 1):
        meter.update(labels, attention_mask=mask)
        clock.now += 1.0
        is_last = micro_batch == micro_batches
        if micro_batch % accumulate and not is_last:
            continue
        step += 1
        if step % log_every == 0 or is_last:
            records.append(meter.record(step))
    return meter, records


@pytest.mark.parametrize("accumulate", [1, 3, 8])
@pytest.mark.parametrize("log_every", [1, 4])
def test_rates_do_not_depend_on_accumulation(accumulate: int, log_every: int) -> None:
    """However micro-batches make steps and steps make windows: 8 slots a second stay 8."""
    _, records = train(24, accumulate, log_every)
    assert {record.raw_tps for record in records} == {8.0}
    assert {record.active_tps for record in records} == {4.0}
    assert sum(record.raw_tokens for record in records) == records[-1].total_raw_tokens == 24 * 8
    assert sum(record.steps for record in records) == 24 // accumulate


def test_accumulated_window_by_hand() -> None:
    """3 micro-batches a step, 4 steps a window: 12 × 8 slots in 12 s."""
    _, records = train(24, accumulate=3, log_every=4)
    first = records[0]
    assert (first.step, first.steps, first.raw_tokens, first.elapsed_s) == (4, 4, 96, 12.0)
    assert (first.active_tokens, first.padded_tokens, first.masked_tokens) == (48, 24, 24)


def test_last_window_is_short() -> None:
    """10 steps, a record every 4, the last micro-batches make no whole step: 4, 4 and 2 steps."""
    _, records = train(29, accumulate=3, log_every=4)
    assert [record.steps for record in records] == [4, 4, 2]
    assert [record.raw_tokens for record in records] == [96, 96, 40]
    assert [record.elapsed_s for record in records] == [12.0, 12.0, 5.0]
    assert records[-1].raw_tps == 8.0


# --- waiting for data ----------------------------------------------------------------------------


def test_stream_without_length_in_a_real_loader() -> None:
    """A torch DataLoader over a stream: no length is asked for, and each wait is measured."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    loader = meter.watch(DataLoader(Stream(7, clock), batch_size=2))
    sizes = []
    for batch in loader:
        meter.update(batch, attention_mask=batch >= 0)
        clock.now += STEP_S
        sizes.append(len(batch))
    record = meter.record(4)
    assert sizes == [2, 2, 2, 1]
    assert (record.raw_tokens, record.active_tokens) == (35, 28)
    assert record.data_wait_s == 7 * WAIT_S
    assert record.elapsed_s == 4 * STEP_S + 7 * WAIT_S
    assert record.data_wait_frac == 3.5 / 11.5
    with pytest.raises(TypeError):
        len(loader)


def test_real_loader_keeps_its_length() -> None:
    """A loader with a length still has it, for progress bars and schedules."""
    meter = ThroughputMeter()
    loader = meter.watch(DataLoader(Rows(), batch_size=4, drop_last=True))
    assert len(loader) == len(list(loader)) == 2


def test_loader_with_a_worker() -> None:
    """Batches of another process come through, and no more is waited than time has passed."""
    meter = ThroughputMeter()
    total = sum(int(batch.sum()) for batch in meter.watch(DataLoader(Rows(), num_workers=1)))
    record = meter.record(1)
    assert total == sum(int(row.sum()) for row in (Rows()[i] for i in range(10)))
    assert record.data_wait_s is not None
    assert 0.0 < record.data_wait_s <= record.elapsed_s


def test_wait_is_that_of_the_window() -> None:
    """Records inside the loop take each wait into the window in which it ended."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    waits = []
    for step, _ in enumerate(meter.watch(DataLoader(Stream(4, clock), batch_size=1)), start=1):
        clock.now += STEP_S
        if step % 2 == 0:
            waits.append(meter.record(step).data_wait_s)
    assert waits == [2 * WAIT_S, 2 * WAIT_S]


def test_epochs_and_breaks() -> None:
    """One watched loader serves many epochs, also one that is broken off."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    loader = meter.watch(DataLoader(Stream(4, clock), batch_size=1))
    for _ in loader:
        clock.now += STEP_S
    for _ in loader:
        break
    assert meter.record(4).data_wait_s == 5 * WAIT_S


def test_phase_in_a_watched_loop_is_no_wait() -> None:
    """Neither the evaluation in a loop nor the batches it reads are waits of training."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    for batch in meter.watch(DataLoader(Stream(2, clock), batch_size=1)):
        meter.update(batch, attention_mask=batch >= 0)
        clock.now += STEP_S
        with meter.phase("eval"):
            for held_out in meter.watch(DataLoader(Stream(3, clock), batch_size=1)):
                meter.update(held_out, attention_mask=held_out >= 0)
                clock.now += 10.0
    record = meter.record(2)
    assert (record.data_wait_s, record.elapsed_s) == (2 * WAIT_S, 2 * (WAIT_S + STEP_S))
    assert record.paused_s == 2 * 3 * (WAIT_S + 10.0)
    assert (record.raw_tokens, record.active_tokens) == (10, 8)


def test_loader_that_fails() -> None:
    """An error of the loader comes through, and what was counted before it stays."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        for _ in meter.watch(broken()):
            meter.add(TokenCounts(8, 4, 2))
            clock.now += STEP_S
    assert meter.record(1).raw_tps == 8 / STEP_S


# --- phases --------------------------------------------------------------------------------------


def test_error_in_a_phase_ends_it() -> None:
    """After an error inside, the clock of training runs again and tokens count again."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    with pytest.raises(KeyError), meter.phase("checkpoint"):
        clock.now += 5.0
        raise KeyError
    meter.add(TokenCounts(8, 4, 2))
    clock.now += STEP_S
    record = meter.record(1)
    assert (record.raw_tokens, record.elapsed_s, record.paused_s) == (8, STEP_S, 5.0)


def test_records_inside_nested_phases() -> None:
    """Windows that lie in phases altogether have no time and no rate; none of it is lost."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    meter.add(TokenCounts(8, 4, 2))
    clock.now += STEP_S
    with meter.phase("eval"):
        clock.now += 1.0
        with meter.phase("checkpoint"):
            clock.now += 1.0
            first = meter.record(1)
            clock.now += 1.0
            second = meter.record(1)
        clock.now += 1.0
    clock.now += STEP_S
    third = meter.record(2)
    assert [r.paused_s for r in (first, second, third)] == [2.0, 1.0, 1.0]
    assert [r.elapsed_s for r in (first, second, third)] == [STEP_S, 0.0, STEP_S]
    assert second.raw_tps is None
    assert third.total_elapsed_s == 2 * STEP_S


def test_phases_of_one_name_follow_each_other() -> None:
    """The same phase comes again and again, and one may be shorter than the clock can tell."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    for seconds in (1.0, 0.0, 3.0):
        with meter.phase("eval"):
            clock.now += seconds
        clock.now += STEP_S
    assert meter.record(1).paused_s == 4.0


# --- warm-up and utilisation ---------------------------------------------------------------------


def test_warmup_begins_again_after_a_restart() -> None:
    """A restarted process is cold again, so its first windows are marked again."""
    meter = ThroughputMeter(clock=Clock(), warmup_windows=2)
    assert [meter.record(step).warmup for step in (1, 2, 3)] == [True, True, False]
    resumed = ThroughputMeter(clock=Clock(), warmup_windows=2)
    resumed.load_state_dict(meter.state_dict())
    assert [resumed.record(step).warmup for step in (4, 5, 6)] == [True, True, False]


def measured(counts: TokenCounts, seconds: float, **options: Any) -> ThroughputRecord:
    """The record of one window with these counts."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock, **options)
    meter.add(counts)
    with meter.phase("eval"):
        clock.now += 100.0
    clock.now += seconds
    return meter.record(1)


KNOWN = {"flops_per_token": 6e9, "peak_flops": 1e12}


def test_utilisation_by_hand() -> None:
    """150 tokens that are no padding, in 2 s, at 6 GFLOPs, of 1 TFLOP/s: 0.45; phases left out."""
    record = measured(TokenCounts(200, 20, 50), 2.0, **KNOWN)
    assert record.mfu == pytest.approx(0.45, rel=1e-12)


def test_utilisation_counts_context_and_no_padding() -> None:
    """Masked tokens cost as much as active ones; padding is no work of the model."""
    few, all_active = TokenCounts(200, 0, 50), TokenCounts(200, 150, 50)
    assert measured(few, 2.0, **KNOWN).mfu == measured(all_active, 2.0, **KNOWN).mfu
    assert measured(TokenCounts(150, 0, 0), 2.0, **KNOWN).mfu == measured(few, 2.0, **KNOWN).mfu


def test_utilisation_is_of_all_devices() -> None:
    """Four devices have four peaks."""
    one = measured(TokenCounts(200, 20, 50), 2.0, **KNOWN).mfu
    four = measured(TokenCounts(200, 20, 50), 2.0, ranks=RankLayout(devices=4), **KNOWN).mfu
    assert one is not None
    assert four == one / 4


def test_utilisation_of_replicas() -> None:
    """Two tensor parallel ranks do the work of one batch together."""
    rank = {"raw": 200, "active": 20, "padded": 50, "elapsed_s": 2.0}
    record = record_of_ranks([rank, rank], replicas=2, **KNOWN)
    assert record.mfu == pytest.approx(0.45 / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("counts", "seconds", "options"),
    [
        (TokenCounts(200, 20, 50), 2.0, {}),
        (TokenCounts(200, 20, 50), 2.0, {"flops_per_token": 6e9}),
        (TokenCounts(200, 20, 50), 2.0, {"peak_flops": 1e12}),
        (TokenCounts(200, 20, None), 2.0, KNOWN),
        (TokenCounts(200, 20, 50), 0.0, KNOWN),
    ],
    ids=["nothing given", "no peak", "no flops", "padding unknown", "no time"],
)
def test_utilisation_is_never_guessed(
    counts: TokenCounts, seconds: float, options: dict[str, float]
) -> None:
    """Without both numbers, known padding and some time there is no utilisation."""
    assert measured(counts, seconds, **options).mfu is None


def test_utilisation_of_an_empty_window_is_0() -> None:
    """Time that passed without tokens is time in which the device did nothing."""
    assert measured(TokenCounts(0, 0, 0), 2.0, **KNOWN).mfu == 0.0

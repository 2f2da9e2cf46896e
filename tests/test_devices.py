"""Devices: nothing waits for them but `record`, and their counts are those of the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driving import Clock, load_cases
from stalls import Stall, Watch, as_if_on_a_device, no_stall
from tokrate import ThroughputMeter, count_tokens
from tokrate.accumulator import Accumulator
from tokrate.arrays import checksum
from tokrate.counting import Tally
from tokrate.errors import CountingError

ROWS, LENGTH = 4, 16
Tensors = dict[str, Any]


def make_batch(device: str = "cpu", **kinds: Any) -> Tensors:
    """Rows of 16 slots: 4 of prompt, 8 of answer, 4 of padding."""
    labels = torch.full((ROWS, LENGTH), -100, device=device)
    labels[:, 4:12] = 7
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64, device=device)
    mask[:, 12:] = 0
    ids = torch.where(mask == 1, 5, 0)
    every = {
        "labels": labels,
        "loss_mask": labels != -100,
        "attention_mask": mask,
        "input_ids": ids,
        "cu_seqlens": torch.tensor([0, 20, 48], dtype=torch.int32, device=device),
        "pad_id": 0,
    }
    return {name: every[name] for name in kinds["names"]}


WAYS = {
    "labels": ("labels",),
    "mask": ("labels", "attention_mask"),
    "loss mask": ("loss_mask", "attention_mask"),
    "packed": ("labels", "cu_seqlens"),
    "pad id": ("labels", "input_ids", "pad_id"),
    "all": ("labels", "loss_mask", "attention_mask", "input_ids"),
}


def run_windows(meter: ThroughputMeter, batch: Tensors) -> None:
    """Two updates with the full check of a first window."""
    meter.update(**batch)
    meter.update(**batch)


@pytest.mark.parametrize("aligned", [False, True], ids=["shifted", "aligned"])
@pytest.mark.parametrize("way", WAYS)
def test_update_waits_for_no_device(way: str, aligned: bool) -> None:
    """The device path runs no read, no copy to the host and nothing whose size depends on data."""
    batch = make_batch(names=WAYS[way])
    meter = ThroughputMeter(clock=Clock(), labels_aligned=aligned)
    with as_if_on_a_device(), no_stall() as watch:
        run_windows(meter, batch)
    assert watch.kernels  # the device path it was


@pytest.mark.parametrize("aligned", [False, True], ids=["shifted", "aligned"])
@pytest.mark.parametrize("way", WAYS)
def test_update_needs_no_values(way: str, aligned: bool) -> None:
    """It even runs on the meta device, whose tensors have no values that could be read."""
    batch = make_batch("meta", names=WAYS[way])
    meter = ThroughputMeter(clock=Clock(), labels_aligned=aligned)
    with no_stall():
        run_windows(meter, batch)


STALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "int": lambda t: int(t.sum()),
    "if": lambda t: 1 if t.any() else 0,
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu", torch.int32),
    "copy": lambda t: torch.empty_like(t).copy_(t),
    "nonzero": lambda t: t.nonzero(),
    "by mask": lambda t: t[t > 0],
    "masked_select": lambda t: t.masked_select(t > 0),
    "unique": lambda t: t.unique(),
    "equal": lambda t: torch.equal(t, t + 1),
}


@pytest.mark.parametrize("way", STALLS)
def test_the_check_can_fail(way: str) -> None:
    """Each way to wait for a device is found by the check above."""
    with pytest.raises(Stall), no_stall():
        STALLS[way](torch.arange(4))


def test_record_reads_once() -> None:
    """However many batches a window had, their counts come over in one read."""
    batch = make_batch(names=WAYS["mask"])
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    with as_if_on_a_device():
        for _ in range(8):
            meter.update(**batch)
        clock.now = 2.0
        with Watch() as watch:
            record = meter.record(1)
    assert watch.stalls == ["tolist"]
    # 8 batches of 64 slots, 32 of them targets and 16 padding
    assert (record.raw_tokens, record.active_tokens, record.padded_tokens) == (512, 256, 128)
    assert record.raw_tps == 256.0


def test_next_window_begins_at_zero() -> None:
    """Counts on the device are cleared with the window, without a wait."""
    batch = make_batch(names=WAYS["mask"])
    meter = ThroughputMeter(clock=Clock())
    with as_if_on_a_device():
        meter.update(**batch)
        meter.record(1)
        meter.update(**batch)
        assert meter.record(2).raw_tokens == 64


@pytest.mark.parametrize("case", load_cases("counting"), ids=lambda case: case["id"])
def test_shared_case(case: dict[str, Any]) -> None:
    """Each public case gives its numbers on the device path too."""
    batch = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in case["batch"].items()}
    expected = case["expect"]
    with as_if_on_a_device():
        if "error" in expected:
            with pytest.raises(CountingError):
                count_tokens(**batch)
            return
        counts = count_tokens(**batch)
    assert {name: getattr(counts, name) for name in expected} == expected


@st.composite
def any_batches(draw: st.DrawFn) -> dict[str, Any]:
    """Batches of every kind, right and contradictory ones."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))

    def array(values: st.SearchStrategy[int]) -> np.ndarray:
        cells = draw(st.lists(values, min_size=rows * length, max_size=rows * length))
        return np.array(cells, dtype=np.int64).reshape(rows, length)

    batch: dict[str, Any] = {"labels": array(st.sampled_from([-100, 0, 1, 2]))}
    for name, values in (("loss_mask", [0, 1]), ("attention_mask", [0, 1, 2])):
        if draw(st.booleans()):
            batch[name] = array(st.sampled_from(values))
    if draw(st.booleans()):
        batch["input_ids"] = array(st.sampled_from([0, 1, 2]))
        batch["pad_id"] = 0
    if draw(st.booleans()):
        ends = draw(st.lists(st.integers(0, rows * length), max_size=3))
        batch["cu_seqlens"] = np.array([0, *sorted(ends)])
    return batch | {"labels_aligned": draw(st.booleans())}


def outcome(batch: dict[str, Any]) -> object:
    """The counts, or the words of the refusal."""
    try:
        return count_tokens(**batch)
    except CountingError as error:
        return str(error)


@given(any_batches())
def test_device_and_host_agree(batch: dict[str, Any]) -> None:
    """Numpy on the host and torch on the device find the same, word for word."""
    tensors = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}
    with as_if_on_a_device():
        found = outcome(tensors)
    assert found == outcome(batch)


@given(any_batches())
def test_checksum_agrees(batch: dict[str, Any]) -> None:
    """A batch has the same checksum on host and device, and none when it holds one value only."""
    labels = batch["labels"]
    assert checksum(labels) == int(checksum(torch.from_numpy(labels)))
    assert (checksum(labels) == 0) == (len(np.unique(labels)) == 1)


def test_checksum_tells_batches_apart() -> None:
    """Sixteen thousand batches that differ in one place or in order have as many checksums."""
    batches = [np.arange(64) for _ in range(2**14)]
    for number, batch in enumerate(batches):
        batch[number % 64] += number // 64
    swapped = [np.roll(np.arange(64), shift) for shift in range(1, 64)]
    numbers = [checksum(batch) for batch in (*batches[63:], *swapped)]
    assert len(set(numbers)) == len(numbers)


def test_sums_on_a_device_are_int64() -> None:
    """Neither 2**24 (float32) nor 2**31 (int32) is where counting stops."""
    window = Accumulator()
    for count in (2**24, 1, 2**40):
        window.add(Tally(2**41, torch.tensor(count), torch.tensor(1, dtype=torch.int32), None))
    sums = window.read()
    assert (sums.active, sums.padded) == (2**40 + 2**24 + 1, 3)


def test_contradiction_on_a_device_is_found_by_record() -> None:
    """Update cannot look; record can, and a first window fails."""
    labels, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 1, 0]])
    meter = ThroughputMeter(clock=Clock())
    with as_if_on_a_device():
        meter.update(labels, attention_mask=mask)
        with pytest.raises(CountingError, match="1 of 3 slots"):
            meter.record(1)


def test_later_contradiction_on_a_device_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """After the first window it is said once, and the fractions are unknown."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    meter.record(1)
    clock.now = 1.0
    all_targets, all_padding = torch.ones(1, 3, dtype=torch.int64), torch.zeros(1, 3)
    with as_if_on_a_device(), caplog.at_level(logging.WARNING, "tokrate"):
        meter.update(all_targets, attention_mask=all_padding)
        record = meter.record(2)
    assert (record.active_tps, record.padded_frac) == (2.0, None)
    assert "do not fit" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("way", WAYS)
def test_update_on_cuda_synchronises_nothing(way: str) -> None:
    """CUDA's own check for synchronising calls stays silent in update, and counts are right."""
    batch = make_batch("cuda", names=WAYS[way])
    meter = ThroughputMeter(clock=Clock())
    meter.update(**batch)  # the first call may set up the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        meter.update(**batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.record(1).active_tokens == 2 * ROWS * 8

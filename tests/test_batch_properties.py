"""What holds for all batches, tried on many: the fast count is the slow one, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokrate import ThroughputMeter, TokenCounts, count_tokens
from tokrate.errors import CountingError

quick = settings(max_examples=60, deadline=None)

KINDS: dict[str, Callable[[Any], Any]] = {
    "list": lambda rows: rows,
    "numpy": np.array,
    "numpy int16": lambda rows: np.array(rows, np.int16),
    "torch": torch.tensor,
    "torch int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "torch, not contiguous": lambda rows: torch.tensor(rows).T.contiguous().T,
}


def rows_of(draw: st.DrawFn, shape: tuple[int, int], values: st.SearchStrategy[int]) -> Any:
    """Nested lists of drawn values."""
    return [[draw(values) for _ in range(shape[1])] for _ in range(shape[0])]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Batches with any labels, masks and ids; many of them contradict themselves."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 6)))
    ignore_index = draw(st.sampled_from([-100, -1, 0]))
    labels = rows_of(draw, shape, st.sampled_from([ignore_index, 1, 2]))
    loss_mask = rows_of(draw, shape, st.integers(0, 1))
    batch = draw(
        st.sampled_from(
            [
                {"labels": labels},
                {"loss_mask": loss_mask},
                {"labels": labels, "loss_mask": loss_mask},
            ]
        )
    )
    if draw(st.booleans()):
        batch["attention_mask"] = rows_of(draw, shape, st.sampled_from([0, 1, 1, 2]))
    if draw(st.booleans()):
        batch["input_ids"] = rows_of(draw, shape, st.integers(0, 2))
        batch["pad_id"] = draw(st.integers(0, 1))
    return batch | {"ignore_index": ignore_index, "labels_aligned": draw(st.booleans())}


def read_slot_by_slot(batch: dict[str, Any]) -> tuple[int, int, int | None] | None:
    """Raw, active and padded as the documentation says it, slot by slot; None for a contradiction.

    Slow and plain on purpose: this is the specification that the fast count is compared with.
    """
    labels, loss_mask = batch.get("labels"), batch.get("loss_mask")
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    aligned, shape = batch["labels_aligned"], labels or loss_mask
    raw = active = padded = 0
    for r, row in enumerate(shape):
        target = [
            (labels is None or labels[r][i] != batch["ignore_index"])
            and (loss_mask is None or loss_mask[r][i] != 0)
            for i in range(len(row))
        ]
        used = [t and (aligned or i > 0) for i, t in enumerate(target)]
        empty = [False] * len(row)
        if mask is not None:
            empty = [value == 0 for value in mask[r]]
            if any(u and e for u, e in zip(used, empty, strict=True)):
                return None
        elif ids is not None:
            real = [
                token != batch["pad_id"] or target[i] or _is_predicted(i, token, target, row, batch)
                for i, token in enumerate(ids[r])
            ]
            empty = [not any(real[: i + 1]) or not any(real[i:]) for i in range(len(row))]
        raw += len(row)
        active += sum(used)
        padded += sum(empty)
    return raw, active, padded if mask is not None or ids is not None else None


def _is_predicted(i: int, token: int, target: list[bool], row: Any, batch: dict[str, Any]) -> bool:
    """Whether a token is the target of the slot before it, so that it cannot be padding."""
    shifted_by_collator = batch["labels_aligned"] and "labels" in batch
    return shifted_by_collator and i > 0 and target[i - 1] and row[i - 1] == token


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(batches())
def test_fast_count_is_the_slow_one(kind: str, batch: dict[str, Any]) -> None:
    """Every kind of array gives what reading slot by slot gives, or refuses what contradicts."""
    given_arrays = {n: KINDS[kind](v) if isinstance(v, list) else v for n, v in batch.items()}
    expected = read_slot_by_slot(batch)
    if expected is None:
        with pytest.raises(CountingError, match="at once"):
            count_tokens(**given_arrays)
    else:
        assert count_tokens(**given_arrays) == TokenCounts(*expected)


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(batches())
def test_later_windows_count_the_same(kind: str, batch: dict[str, Any]) -> None:
    """Behind the first window the usual batch takes a shorter way, to the same counts."""
    expected = read_slot_by_slot(batch)
    assume(expected is not None)
    meter = ThroughputMeter(ignore_index=batch.pop("ignore_index"))
    meter.record(0)
    meter.update(**{n: KINDS[kind](v) if isinstance(v, list) else v for n, v in batch.items()})
    record = meter.record(1)
    counts = (record.raw_tokens, record.active_tokens, record.padded_tokens)
    assert counts == expected
    assert {type(count) for count in counts} <= {int, type(None)}  # no number of numpy


TWO = torch.ones(1, 2, dtype=torch.int64)
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "mask of another shape": ({"labels": TWO, "attention_mask": TWO[:, :1]}, "shapes differ"),
    "ids of another shape": ({"labels": TWO, "input_ids": TWO[:, :1]}, "shapes differ"),
    "ids on a device": ({"labels": TWO, "input_ids": TWO.to("meta")}, "different devices"),
    "mask on a device": ({"labels": TWO, "attention_mask": TWO.to("meta")}, "different devices"),
    "labels with fractions": ({"labels": TWO.float()}, "expected whole numbers"),
    "a single label": ({"labels": TWO[0, 0]}, "a single number"),
    "sparse labels": ({"labels": TWO.to_sparse()}, "sparse_coo"),
    "no mask": ({"labels": TWO, "attention_mask": "1 1"}, "expected whole numbers or booleans"),
}


@pytest.mark.parametrize("odd", ODD)
def test_later_windows_refuse_the_same(odd: str, caplog: pytest.LogCaptureFixture) -> None:
    """What the shorter way cannot count goes the long way, which says what is wrong."""
    batch, message = ODD[odd]
    meter = ThroughputMeter()
    meter.record(0)
    meter.update(**batch)
    assert message in caplog.text


@pytest.mark.parametrize(
    "mask",
    [TWO.bool(), TWO.bfloat16(), TWO.float().requires_grad_(), TWO.to(torch.uint8), 3 * TWO],
    ids=["bool", "bfloat16", "with a gradient", "uint8", "document numbers"],
)
def test_later_windows_take_every_mask(mask: torch.Tensor) -> None:
    """Those that numpy can look into, and those that it cannot."""
    meter = ThroughputMeter(labels_aligned=True)
    meter.record(0)
    meter.update(TWO, attention_mask=mask, input_ids=TWO)
    record = meter.record(1)
    assert (record.raw_tokens, record.active_tokens, record.padded_tokens) == (2, 2, 0)


@st.composite
def good_batches(draw: st.DrawFn) -> dict[str, Any]:
    """Batches that do not contradict themselves, as numpy arrays."""
    batch = draw(batches().filter(lambda b: "attention_mask" in b and read_slot_by_slot(b)))
    return {n: np.array(v) if isinstance(v, list) else v for n, v in batch.items()}


def piece(batch: dict[str, Any], where: Any) -> dict[str, Any]:
    """Some rows or columns of a batch."""
    return {n: v[where] if isinstance(v, np.ndarray) else v for n, v in batch.items()}


@quick
@given(good_batches(), st.data())
def test_cutting_between_rows_changes_nothing(batch: dict[str, Any], data: st.DataObject) -> None:
    """Two micro-batches are the batch that they were cut from."""
    cut = data.draw(st.integers(0, len(batch["attention_mask"])))
    parts = [count_tokens(**piece(batch, np.s_[:cut])), count_tokens(**piece(batch, np.s_[cut:]))]
    assert parts[0] + parts[1] == count_tokens(**batch)


@quick
@given(good_batches(), st.data())
def test_cutting_within_rows_costs_what_the_shift_takes(
    batch: dict[str, Any], data: st.DataObject
) -> None:
    """Shards of aligned labels add up; a shift loses the targets at the cut, as the loss does."""
    batch |= {"attention_mask": np.ones_like(batch["attention_mask"])}
    cut = data.draw(st.integers(1, batch["attention_mask"].shape[1]))
    whole = count_tokens(**batch)
    parts = count_tokens(**piece(batch, np.s_[:, :cut])) + count_tokens(
        **piece(batch, np.s_[:, cut:])
    )
    first = piece(batch, np.s_[:, cut : cut + 1]) | {"labels_aligned": True}
    lost = 0 if batch["labels_aligned"] else count_tokens(**first).active
    assert (parts.raw, parts.active, parts.padded) == (whole.raw, whole.active - lost, whole.padded)


@quick
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 4), st.data())
def test_cutting_a_packed_buffer_between_documents_changes_nothing(
    lengths: list[int], tail: int, data: st.DataObject
) -> None:
    """Documents of two buffers are those of one, empty ones and the tail included."""
    ends = np.cumsum([0, *lengths])
    labels = np.array([1] * int(ends[-1]) + [-100] * tail, dtype=np.int64)
    at = data.draw(st.integers(0, len(lengths)))
    cut = ends[at]
    head = count_tokens(labels[:cut], cu_seqlens=ends[: at + 1], labels_aligned=True)
    rest = count_tokens(labels[cut:], cu_seqlens=ends[at:] - cut, labels_aligned=True)
    whole = count_tokens(labels, cu_seqlens=ends, labels_aligned=True)
    assert head + rest == whole == TokenCounts(int(ends[-1]) + tail, int(ends[-1]), tail)

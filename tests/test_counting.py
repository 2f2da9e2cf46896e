"""Counting: the shared cases, hand-worked batches, and what must be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driving import load_cases
from tokrate import TokenCounts, count_tokens
from tokrate.errors import CountingError

KINDS = {
    "list": lambda rows: rows,
    "numpy": np.array,
    "torch": torch.tensor,
    "torch int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
}


def converted(batch: dict[str, Any], kind: str) -> dict[str, Any]:
    """The batch with its arrays in another kind."""
    return {k: KINDS[kind](v) if isinstance(v, list) else v for k, v in batch.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", load_cases("counting"), ids=lambda case: case["id"])
def test_shared_case(case: dict[str, Any], kind: str) -> None:
    """Each public case gives its numbers for lists, numpy and torch alike."""
    batch, expected = converted(case["batch"], kind), case["expect"]
    if "error" in expected:
        with pytest.raises(CountingError):
            count_tokens(**batch)
        return
    counts = count_tokens(**batch)
    assert {name: getattr(counts, name) for name in expected} == expected


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Batches that a right collator can make: rows of context, targets, then padding."""
    length = draw(st.integers(1, 12))
    rows, masks = [], []
    for _ in range(draw(st.integers(1, 5))):
        real = draw(st.integers(0, length))
        label = st.one_of(st.just(-100), st.integers(1, 9))
        rows.append([*(draw(label) for _ in range(real)), *[-100] * (length - real)])
        masks.append([1] * real + [0] * (length - real))
    return {"labels": rows, "attention_mask": masks, "labels_aligned": draw(st.booleans())}


@given(batches())
def test_classes_add_up(batch: dict[str, Any]) -> None:
    """Active, masked and padded slots are all slots, and each slot is one of them."""
    counts = count_tokens(**batch)
    start = 0 if batch["labels_aligned"] else 1
    assert counts.raw == sum(len(row) for row in batch["labels"])
    assert counts.active == sum(x != -100 for row in batch["labels"] for x in row[start:])
    assert counts.padded == sum(x == 0 for row in batch["attention_mask"] for x in row)
    assert counts.active + counts.masked + counts.padded == counts.raw


@given(batches(), st.data())
def test_splitting_rows_changes_nothing(batch: dict[str, Any], data: st.DataObject) -> None:
    """Counting a batch in two parts and adding is counting it whole."""
    cut = data.draw(st.integers(0, len(batch["labels"])))
    width = len(batch["labels"][0])
    parts = [
        {
            **batch,
            "labels": np.reshape(batch["labels"][piece], (-1, width)),
            "attention_mask": np.reshape(batch["attention_mask"][piece], (-1, width)),
        }
        for piece in (slice(None, cut), slice(cut, None))
    ]
    parts = [
        {k: v.astype(np.int64) if isinstance(v, np.ndarray) else v for k, v in part.items()}
        for part in parts
    ]
    assert count_tokens(**parts[0]) + count_tokens(**parts[1]) == count_tokens(**batch)


@given(batches())
def test_pad_id_agrees_with_mask(batch: dict[str, Any]) -> None:
    """Padding read off the ids is that of the mask when the pad token stands nowhere else."""
    ids = [[7 if real else 0 for real in row] for row in batch["attention_mask"]]
    by_id = count_tokens(
        batch["labels"], input_ids=ids, pad_id=0, labels_aligned=batch["labels_aligned"]
    )
    assert by_id == count_tokens(**batch)


def test_left_padding_by_id() -> None:
    """The run of pad tokens may stand at the left end, and a row may hold nothing else."""
    ids = [[0, 0, 5, 6], [0, 0, 0, 0], [5, 0, 6, 0]]
    labels = [[-100, -100, 5, 6], [-100] * 4, [5, 0, 6, -100]]
    assert count_tokens(labels, input_ids=ids, pad_id=0) == TokenCounts(12, 4, 2 + 4 + 1)


def test_pad_token_inside_a_row_is_no_padding() -> None:
    """Only the unbroken run at an end is padding."""
    counts = count_tokens([[-100] * 5], input_ids=[[1, 0, 0, 2, 0]], pad_id=0)
    assert counts.padded == 1


def test_loss_mask_and_labels_together() -> None:
    """Labels that are never ignored leave the choice to the loss mask (Megatron)."""
    counts = count_tokens([[5, 6, 7, 8]], loss_mask=[[0.0, 1.0, 1.0, 0.0]], labels_aligned=True)
    assert counts.active == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_mask_of_any_type(dtype: torch.dtype) -> None:
    """A mask may be boolean, whole or floating."""
    mask = torch.tensor([[1, 1, 0]], dtype=dtype)
    assert count_tokens([[5, 6, -100]], attention_mask=mask, labels_aligned=True).padded == 1


def test_unused_pad_id_asks_nothing() -> None:
    """A pad token of the run does not make the ids matter where a mask decides."""
    counts = count_tokens(
        [[1, 2]],
        input_ids=[[1, 2, 3]],
        pad_id=0,
        attention_mask=[[1, 1]],
        raw=5,
        labels_aligned=True,
    )
    assert counts == TokenCounts(5, 2, 0)


def test_empty_tensor_has_no_type_of_its_own() -> None:
    """`torch.tensor([])` is float; a rank without tokens may well pass it."""
    assert count_tokens(torch.tensor([])).raw == 0


def test_raw_given_for_a_second_sequence() -> None:
    """`raw` counts slots that no array shows, such as image patches or an encoder's input."""
    counts = count_tokens([[5, 6]], input_ids=[[1, 2, 3]], raw=5, labels_aligned=True)
    assert counts == TokenCounts(5, 2, None)


def test_empty_batch() -> None:
    """A rank without tokens counts zero of everything."""
    assert count_tokens([], attention_mask=[]) == TokenCounts(0, 0, 0)
    assert count_tokens(np.zeros((0, 8), np.int64), labels_aligned=True).raw == 0
    assert (
        count_tokens(np.zeros((2, 0), np.int64), input_ids=np.zeros((2, 0)), pad_id=0).padded == 0
    )


def test_large_counts_are_exact() -> None:
    """Counts are Python ints: adding never loses a token, as float32 does from 2**24 on."""
    total = TokenCounts(2**40, 2**39, 1) + TokenCounts(1, 1, 0)
    assert total == TokenCounts(2**40 + 1, 2**39 + 1, 1)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "neither labels nor loss_mask"),
        ({"input_ids": [[1, 2]]}, "neither labels nor loss_mask"),
        ({"labels": [[1, 2], [3]]}, "no rectangular array"),
        ({"labels": [["a", "b"]]}, "expected whole numbers"),
        ({"labels": [[1.5, 2.0]]}, "expected whole numbers"),
        ({"labels": 5}, "single number"),
        ({"labels": [[1, 2]], "attention_mask": [[1, 1, 1]]}, r"labels \(1, 2\)"),
        ({"labels": [[1, 2]], "attention_mask": np.ones((1, 1, 2, 2))}, "one for each slot"),
        ({"labels": [[1, 2]], "attention_mask": [[0.0, -1e9]]}, "additive"),
        ({"labels": [1, 2], "cu_seqlens": [0, 3]}, "end within the buffer"),
        ({"labels": [1, 2], "cu_seqlens": [1, 2]}, "start at 0"),
        ({"labels": [1, 2], "cu_seqlens": [0, 2, 1]}, "never fall"),
        ({"labels": [1, 2], "cu_seqlens": []}, "documents"),
        ({"labels": [1, 2], "cu_seqlens": [0, 1], "labels_aligned": True}, "at once"),
        ({"labels": [[1, 2, 3]], "raw": 1}, "do not fit"),
        ({"labels": [1, 2], "cu_seqlens": [0.0, 2.5]}, "expected whole numbers"),
        ({"labels": [1, 2], "ignore_index": None}, "ignore_index=None"),
        ({"labels": [1, 2], "input_ids": [1, 2], "pad_id": "<pad>"}, "pad_id='<pad>'"),
        ({"labels": torch.tensor([[1, 2]]).to_sparse()}, "sparse"),
        (
            {"labels": torch.tensor([1, 2]), "cu_seqlens": torch.tensor([0, 2]).to("meta")},
            "lies on",
        ),
        ({"labels": [[1, 2, 3]], "raw": 2.5}, "no whole number"),
    ],
)
def test_refused(batch: dict[str, Any], words: str) -> None:
    """What cannot be counted is refused in words that say what was found and expected."""
    with pytest.raises(CountingError, match=words):
        count_tokens(**batch)


@pytest.mark.parametrize("counts", [(1, 2, 0), (4, 2, 3), (-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_counts_that_cannot_be(counts: tuple[int, int, int]) -> None:
    """Counts made elsewhere are checked too."""
    with pytest.raises(CountingError, match=r"do not fit|at least 0"):
        TokenCounts(*counts)


def test_numpy_counts_become_ints() -> None:
    """Counts from a numpy program are taken as plain ints, floats are refused."""
    counts = TokenCounts(np.int64(8), np.int32(4), np.int64(2))
    assert [type(n) for n in (counts.raw, counts.active, counts.padded)] == [int] * 3
    with pytest.raises(CountingError, match="no whole number"):
        TokenCounts(8.0, 4, 2)

"""From documents to batches: one document to a row (padded), or as many as fit (packed).

    padded   [ document 1 . . . . . . . . ]      packed   [ document 1 | document 3 | doc 4 ]
             [ document 2 (the longest)   ]               [ document 2 (the longest)        ]

Both go through the same `collate`: a padded batch is a pack with one document in each row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count

import torch
from torch import Tensor

from tokrate.demo.arms import Layout, Target, check_feed
from tokrate.demo.data import MAX_SLOTS, PAD_ID, Document

Row = Sequence[Document]
"""The documents that share a row of a batch."""

IGNORE_INDEX = -100
"""Label of a slot that is no target (PyTorch's default in `cross_entropy`)."""
ROWS = 16
"""Rows of a batch."""
# A document looks for room in this many rows, so that a pack is full and the order stays random.
_OPEN_ROWS = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step trains on. All tensors are int64 of shape [rows, width]."""

    tokens: Tensor
    """Token in each slot, `PAD_ID` where there is none."""
    labels: Tensor
    """Token that follows in the same document (already shifted), else `IGNORE_INDEX`."""
    documents: Tensor
    """Number of the slot's document in its row, from 1; 0 is padding."""
    positions: Tensor
    """Position of the slot in its document, from 0."""


def collate(rows: Sequence[Row], *, width: int | None = None, target: Target = "all") -> Batch:
    """The rows as one batch.

    Args:
        rows: Documents of each row, one after the other.
        width: Slots in a row; default: what the longest row needs.
        target: Which tokens the loss is taken over.
    """
    width = width or max(sum(document.slots for document in row) for row in rows)
    shape = (len(rows), width)
    batch = Batch(
        tokens=torch.full(shape, PAD_ID),
        labels=torch.full(shape, IGNORE_INDEX),
        documents=torch.zeros(shape, dtype=torch.int64),
        positions=torch.zeros(shape, dtype=torch.int64),
    )
    for index, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row, start=1):
            _place(batch, index, start, document, number, target)
            start += document.slots
    return batch


def _place(
    batch: Batch, row: int, start: int, document: Document, number: int, target: Target
) -> None:
    """Write one document into its slots; its last token is only a target, so none crosses over."""
    slots = slice(start, start + document.slots)
    tokens = torch.tensor(document.tokens)
    batch.tokens[row, slots] = tokens[:-1]
    batch.labels[row, slots] = tokens[1:]
    batch.documents[row, slots] = number
    batch.positions[row, slots] = torch.arange(document.slots)
    if target == "answers":
        batch.labels[row, start : start + document.prompt_tokens - 1] = IGNORE_INDEX


def pad_rows(documents: Sequence[Document]) -> list[Row]:
    """One document to a row."""
    return [(document,) for document in documents]


def pack_rows(documents: Sequence[Document], *, width: int = MAX_SLOTS) -> list[Row]:
    """As many documents to a row as fit: each goes into the first open row that has room.

    Args:
        documents: None longer than `width` slots.
        width: Slots in a row.
    """
    closed: list[Row] = []
    rows: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        fits = (index for index, free in enumerate(room) if document.slots <= free)
        index = next(fits, len(rows))
        if index == len(rows):
            rows.append([])
            room.append(width)
        rows[index].append(document)
        room[index] -= document.slots
        if len(rows) > _OPEN_ROWS:
            fullest = room.index(min(room))
            closed.append(rows.pop(fullest))
            room.pop(fullest)
    return closed + [list(row) for row in rows]


def epoch_batches(
    documents: Sequence[Document],
    *,
    layout: Layout,
    target: Target = "all",
    seed: int = 0,
    rows: int = ROWS,
) -> Iterator[Batch]:
    """One pass through the documents in a random order that depends on the seed only.

    Args:
        rows: Rows of a batch; the last batch may have fewer.
    """
    width = MAX_SLOTS if layout == "packed" else None
    every = _epoch_rows(documents, layout, seed)
    for start in range(0, len(every), rows):
        yield collate(every[start : start + rows], width=width, target=target)


def training_batches(
    documents: Sequence[Document],
    *,
    layout: Layout,
    target: Target = "all",
    seed: int = 0,
    rows: int = ROWS,
) -> Iterator[Batch]:
    """Batches without end: epoch after epoch, each in an order of its own.

    Raises:
        ConfigError: There is no such layout or target.
    """
    check_feed(layout, target)
    return chain.from_iterable(
        epoch_batches(documents, layout=layout, target=target, seed=epoch, rows=rows)
        for epoch in count(seed)
    )


def steps_per_epoch(documents: Sequence[Document], *, layout: Layout, seed: int = 0) -> int:
    """Batches that one pass through the documents takes."""
    return -(-len(_epoch_rows(documents, layout, seed)) // ROWS)


def _epoch_rows(documents: Sequence[Document], layout: Layout, seed: int) -> list[Row]:
    order = list(documents)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, no secret
    return pack_rows(order) if layout == "packed" else pad_rows(order)

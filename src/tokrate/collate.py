"""Counting where batches are made: in the workers of a DataLoader, off the main thread.

    worker   samples ──► collate_fn ──► count ──► CountedBatch(batch, counts) ─┐ queue, pin
    main     model(**batch) ◄── batch ◄── meter.watch(loader) ◄────────────────┘
                                               └──► counts into the window

A named tuple travels, since DataLoader, its pinning thread and what moves batches to a device
all know how to take one apart; no key is added that a model would be called with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokrate.counting import IGNORE_INDEX
from tokrate.errors import CountingError
from tokrate.finding import CountingRules, Finding

KEYS = ("labels", "loss_mask", "attention_mask", "input_ids", "cu_seqlens")
"""Keys of a batch that are understood by their name: arguments of `count_tokens`."""
ARGUMENTS = (*KEYS, "raw")


class CountedBatch(NamedTuple):
    """A batch as `collate_fn` made it, and its counts. `meter.watch` hands on the batch alone."""

    batch: Any
    counts: Finding
    """What `meter.add` takes."""


class CountingCollator:
    """Wraps a `collate_fn` so that each batch is counted where it is made.

    Iterate over the loader through `meter.watch(loader)`: it takes the counts and hands on exactly
    what `collate_fn` returned. A loop of another shape passes `counted.counts` to `meter.add` and
    trains on `counted.batch`.

    Args:
        collate_fn: Turns samples into a batch.
        fields: Where the batch has what: argument of `count_tokens` to key or position, such as
            `{"input_ids": 0, "labels": 1}` for tuples. None: a dict's own keys, by their names.
        ignore_index: Label of slots that the loss leaves out.
        labels_aligned: Whether labels stand where the loss reads them; see `count_tokens`.
        pad_id: Padding token, used with `input_ids` when no mask tells padding.

    Raises:
        CountingError: `fields` names something that `count_tokens` does not take.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        *,
        fields: Mapping[str, str | int] | None = None,
        ignore_index: int = IGNORE_INDEX,
        labels_aligned: bool = False,
        pad_id: int | None = None,
    ) -> None:
        unknown = sorted(set(fields or ()) - set(ARGUMENTS))
        if unknown:
            raise CountingError(
                f"fields= names {', '.join(unknown)}: expected arguments of count_tokens "
                f"({', '.join(ARGUMENTS)}) with the key or position of each in the batch"
            )
        self._collate_fn = collate_fn
        self._fields = None if fields is None else dict(fields)
        self._rules = CountingRules(
            ignore_index=ignore_index, labels_aligned=labels_aligned, pad_id=pad_id
        )

    def __call__(self, samples: Any) -> CountedBatch:
        """Collate and count. What is wrong with the batch travels along; the meter raises it."""
        batch = self._collate_fn(samples)
        try:
            arrays = self._arrays(batch)
        except CountingError as problem:
            return CountedBatch(batch, Finding(None, problem))
        # A worker has the time for the full check, and does not know which batch is the run's first
        return CountedBatch(batch, self._rules.find(**arrays, check=True, sign=True))

    def _arrays(self, batch: Any) -> dict[str, Any]:
        if self._fields is None:
            if not isinstance(batch, Mapping):
                raise CountingError(
                    f"the batch is a {type(batch).__name__}, whose parts have no names: pass "
                    'CountingCollator(..., fields={"input_ids": 0, "labels": 1}) or the like'
                )
            return {key: batch[key] for key in KEYS if key in batch}
        try:
            return {name: batch[place] for name, place in self._fields.items()}
        except (LookupError, TypeError) as error:
            raise CountingError(
                f"the batch, a {type(batch).__name__}, has no part {error}: expected the keys or "
                f"positions of fields={self._fields}"
            ) from error

"""Findings: what one batch holds, or what is wrong with it. Counting that never raises.

A worker process cannot know what a contradictory batch should do to the run, so the finding
travels, and the meter that receives it decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tokrate.arrays import as_array, checksum, is_float, is_tensor
from tokrate.counting import IGNORE_INDEX, Batch, Tally, check_counts, tally_batch
from tokrate.errors import CountingError


class Finding(NamedTuple):
    """What counting one batch came to. Plain numbers unless the batch lies on a device."""

    tally: Tally | None
    """None when not even slots and targets could be counted."""
    problem: CountingError | None = None
    """What is wrong with the batch; its tally then says nothing about padding."""
    checksum: Any = 0
    """Equal for equal batches, to find ranks that were fed the same one; 0 when not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingRules:
    """How the batches of a run are read; see `count_tokens`."""

    ignore_index: int = IGNORE_INDEX
    labels_aligned: bool = False
    pad_id: int | None = None

    def find(
        self,
        labels: Any = None,
        loss_mask: Any = None,
        attention_mask: Any = None,
        input_ids: Any = None,
        pad_id: int | None = None,
        cu_seqlens: Any = None,
        raw: int | None = None,
        labels_aligned: bool | None = None,
        *,
        check: bool,
        sign: bool,
    ) -> Finding:
        """Count one batch, without an exception and without waiting for a device.

        Args:
            labels_aligned: Of this batch; None is that of the run.
            check: Also look for targets on padding; see `tally_batch`.
            sign: Also take the checksum.
        """
        batch = Batch(
            labels,
            loss_mask,
            attention_mask,
            input_ids,
            self.pad_id if pad_id is None else pad_id,
            cu_seqlens,
            raw,
            self.ignore_index,
            self.labels_aligned if labels_aligned is None else labels_aligned,
        )
        number = _sign(labels if labels is not None else input_ids) if sign else 0
        try:
            return Finding(_tally(batch, check), None, number)
        except CountingError as error:
            problem = error.with_traceback(None)  # which would keep the batch alive
        try:
            batch = batch._replace(attention_mask=None, cu_seqlens=None, pad_id=None)
            return Finding(_tally(batch, check), problem, number)
        except CountingError:
            return Finding(None, problem, number)


def _tally(batch: Batch, check: bool) -> Tally:
    tally = tally_batch(batch, check=check)
    if not (is_tensor(tally.active) or is_tensor(tally.padded)):
        check_counts(tally)
    return tally


def _sign(tokens: Any) -> Any:
    """Checksum of labels or ids; 0 for what has none, such as a loss mask that is all ones."""
    if tokens is None:
        return 0
    try:
        array = as_array("batch", tokens)
    except CountingError:  # the count itself will say what is wrong
        return 0
    return 0 if is_float(array) else checksum(array)

"""Counting: what each slot of a batch is. Pure, no I/O, no clock.

    raw = active + masked + padded

CPU data is counted with numpy on a zero-copy view; data on another device is counted there, and
the counts stay there as 0-d int64 tensors until somebody asks for them.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from tokrate.arrays import (
    as_array,
    check_boundaries,
    check_mask_values,
    check_together,
    check_token,
    count_true,
    differs,
    is_float,
    is_tensor,
    plain_view,
    size_of,
)
from tokrate.errors import CountingError

IGNORE_INDEX = -100
"""`ignore_index` of torch.nn.CrossEntropyLoss, and so of everybody."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How many slots of a batch are what. Adding two of them adds the classes."""

    raw: int
    """All slots."""
    active: int
    """Real tokens that are a target of the loss."""
    padded: int | None
    """Slots that hold no real token; None when nothing told padding apart."""

    def __post_init__(self) -> None:
        padded = 0 if self.padded is None else self.padded
        if not (type(self.raw) is type(self.active) is type(padded) is int):
            self._coerce()
            padded = self.padded or 0
        if self.active < 0 or padded < 0 or self.active + padded > self.raw:
            raise CountingError(contradiction(self.raw, self.active, self.padded))

    def _coerce(self) -> None:
        """Take numpy integers as ints; refuse what is no whole number."""
        for name in ("raw", "active", "padded"):
            value = getattr(self, name)
            if value is None and name == "padded":
                continue
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise CountingError(
                    f"{name}={value!r} is no whole number: expected a count of tokens"
                ) from None

    @property
    def masked(self) -> int | None:
        """Real tokens that are context only; None when padding is unknown."""
        return None if self.padded is None else self.raw - self.active - self.padded

    def __add__(self, other: Self) -> TokenCounts:
        known = self.padded is not None and other.padded is not None
        padded = self.padded + other.padded if known else None  # type: ignore[operator]
        return TokenCounts(self.raw + other.raw, self.active + other.active, padded)


class Batch(NamedTuple):
    """What one batch is counted by: the arguments of `count_tokens`, as it explains them."""

    labels: Any
    loss_mask: Any
    attention_mask: Any
    input_ids: Any
    pad_id: int | None
    cu_seqlens: Any
    raw: int | None
    ignore_index: int
    labels_aligned: bool


ARRAYS = ("labels", "loss_mask", "attention_mask", "input_ids")
"""The first fields of a batch: arrays with one value for each slot."""


class Tally(NamedTuple):
    """What one pass over a batch found; on a device the numbers are 0-d int64 tensors there."""

    raw: int
    active: Any
    padded: Any
    contradictions: Any
    """Active targets on slots that the mask calls padding; None when not looked for."""


def count_tokens(
    labels: Any = None,
    *,
    loss_mask: Any = None,
    attention_mask: Any = None,
    input_ids: Any = None,
    pad_id: int | None = None,
    cu_seqlens: Any = None,
    raw: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    labels_aligned: bool = False,
) -> TokenCounts:
    """Count the slots of one batch: all, those the loss uses, and those that hold no token.

    Arrays may be torch tensors (any device), numpy arrays or nested lists. One synchronisation
    happens here for device tensors; `ThroughputMeter.update` has none.

    Args:
        labels: Targets, shape (..., length); `ignore_index` where there is none.
        loss_mask: Non-zero where the loss uses the slot, same shape; instead of labels, or
            together with labels that are never `ignore_index`.
        attention_mask: 0 where a slot holds no token: bool, 0/1, or document numbers from 1.
        input_ids: Token ids, same shape; with `pad_id` they tell padding when no mask does.
        pad_id: Padding token. May equal the end-of-text token: a labelled one stays real.
        cu_seqlens: Cumulative document lengths of a packed buffer, shape (documents + 1,);
            slots behind the last are padding.
        raw: Number of slots when it is not the size of an array (images, second sequence).
        ignore_index: Label of slots that the loss leaves out.
        labels_aligned: False when the loss shifts (Hugging Face causal models: slot i predicts
            slot i + 1, the first slot of a row is never a target); True when labels stand where
            the loss reads them (torchtune, masked models, labels shifted by the collator).

    Returns:
        The counts; `padded` is None when no mask, `cu_seqlens` or `pad_id` was given.

    Raises:
        CountingError: Shapes differ, there is nothing to count targets by, or the arguments
            contradict each other (a target on padding, more tokens than slots).

    >>> count_tokens([[-100, -100, 5, 6], [7, 8, -100, -100]], labels_aligned=True,
    ...              attention_mask=[[1, 1, 1, 1], [1, 1, 0, 0]])
    TokenCounts(raw=8, active=4, padded=2)
    """
    check_token("ignore_index", ignore_index)
    if pad_id is not None:
        check_token("pad_id", pad_id)
    batch = Batch(
        labels,
        loss_mask,
        attention_mask,
        input_ids,
        pad_id,
        cu_seqlens,
        raw,
        ignore_index,
        labels_aligned,
    )
    return counts_of(tally_batch(batch, check=True))


def counts_of(tally: Tally) -> TokenCounts:
    """Read a tally (from its device, if it lies on one) and refuse it if it contradicts itself.

    Raises:
        CountingError: A target on padding, or more tokens than slots.
    """
    raw, active, padded, wrong = tally
    if wrong is not None and (wrong := int(wrong)):
        raise CountingError(target_on_padding(wrong, raw))
    # TokenCounts itself refuses what does not fit.
    return TokenCounts(raw, int(active), None if padded is None else int(padded))


def check_counts(tally: Tally) -> None:
    """Refuse a tally of plain ints that contradicts itself.

    Raises:
        CountingError: As `counts_of`.
    """
    raw, active, padded, wrong = tally
    if wrong:
        raise CountingError(target_on_padding(wrong, raw))
    if active + (padded or 0) > raw or (padded or 0) < 0:
        raise CountingError(contradiction(raw, active, padded))


def contradiction(raw: int, active: int, padded: int | None) -> str:
    """The message for counts that cannot be."""
    return (
        f"{active} active + {padded or 0} padded tokens do not fit into {raw} slots: "
        "expected counts of at least 0 with active + padded <= raw; "
        "check ignore_index, labels_aligned and the mask"
    )


def target_on_padding(wrong: int, raw: int) -> str:
    """The message for a mask that calls the slot of a target padding."""
    return (
        f"{wrong} of {raw} slots are a target of the loss and padding by the mask at once: "
        "expected labels to be ignore_index wherever the mask is 0; "
        "check ignore_index and labels_aligned"
    )


def tally_batch(batch: Batch, *, check: bool) -> Tally:
    """One pass over a batch, without any synchronisation.

    Args:
        batch: Its arguments are those of `count_tokens`.
        check: Also look for targets on padding, which costs about as much as the count itself.

    Raises:
        CountingError: As `count_tokens`, but for what only the values of a device tensor show.
    """
    quick = None if check else _tally_usual(batch)
    return _tally_any(batch, check) if quick is None else quick


def _tally_usual(batch: Batch) -> Tally | None:
    """What `_tally_any` finds for the usual batch, in half the time; None where it is another.

    The usual batch is labels, with or without a mask and ids, in plain tensors on the host.
    """
    labels, loss_mask, mask, ids, pad_id, cu_seqlens, raw, ignore_index, aligned = batch
    if not (loss_mask is cu_seqlens is raw is None) or (mask is None and pad_id is not None):
        return None
    if (values := plain_view(labels)) is None or values.dtype.kind != "i" or not values.shape:
        return None
    if ids is not None and (ids.shape != labels.shape or ids.device != labels.device):
        return None
    count = sys.modules["numpy"].count_nonzero
    targets = values != ignore_index
    # The whole minus the first column is faster than a slice, which is not contiguous.
    active = int(count(targets) if aligned else count(targets) - count(targets[..., :1]))
    if mask is None:
        return Tally(values.size, active, None, None)
    if (holds := plain_view(mask)) is None or holds.shape != values.shape:
        return None
    return Tally(values.size, active, int(count(holds == 0)), None)


def _tally_any(batch: Batch, check: bool) -> Tally:
    """As `tally_batch`, for every kind of batch."""
    _, _, mask, _, pad_id, cu_seqlens, raw, ignore_index, labels_aligned = batch
    arrays = {}
    for name, value in zip(ARRAYS, batch, strict=False):  # the others are no arrays
        if value is not None:
            arrays[name] = as_array(name, value)
    if "labels" not in arrays and "loss_mask" not in arrays:
        raise CountingError(
            "nothing says which tokens are targets: found neither labels nor loss_mask; "
            "pass labels= (with ignore_index where there is no target) or loss_mask="
        )
    pad_by_id = pad_id is not None and mask is None and cu_seqlens is None
    check_together(arrays, raw_given=raw is not None, pad_by_id=pad_by_id)
    slots = _slots(arrays) if raw is None else TokenCounts(raw, 0, None).raw
    targets = _targets(arrays, ignore_index)
    active = count_true(targets, shifted=not labels_aligned)
    if mask is not None:
        mask = arrays["attention_mask"]
        holes = mask == 0  # comparing and counting booleans beats counting the mask's own integers
        padded = count_true(holes)
    elif cu_seqlens is not None:
        ends = as_array("cu_seqlens", cu_seqlens)
        check_boundaries(ends, targets, slots if check else None)
        padded = slots - (ends[-1] if is_tensor(ends) else int(ends[-1]))
        holes = _behind(ends[-1] if is_tensor(ends) else int(ends[-1]), targets) if check else None
    elif pad_by_id and "input_ids" in arrays:
        return Tally(slots, active, _pad_runs(arrays, targets, batch), None)
    else:
        return Tally(slots, active, None, None)
    if not check:
        return Tally(slots, active, padded, None)
    wrong = count_true(targets & holes, shifted=not labels_aligned)
    # Whole numbers below 0 are rare, and looking for them costs as much as a count: only where
    # something else is odd. In an additive mask the tokens are what looks like padding.
    readable = mask is not None and not is_tensor(mask)
    if readable and (is_float(mask) or wrong or not (active and padded)):
        check_mask_values(mask)
    return Tally(slots, active, padded, wrong)


# --- the three classes ---------------------------------------------------------------------------


def _slots(arrays: dict[str, Any]) -> int:
    first = arrays.get("input_ids")
    if first is None:
        first = next(iter(arrays.values()))  # labels or loss_mask: one is there, and comes first
    return size_of(first)


def _targets(arrays: dict[str, Any], ignore_index: int) -> Any:
    """True where a label stands that the loss may use (before any shift)."""
    if "loss_mask" not in arrays:
        return differs(arrays["labels"], ignore_index)
    used = arrays["loss_mask"] != 0
    return used & differs(arrays["labels"], ignore_index) if "labels" in arrays else used


def _behind(end: Any, targets: Any) -> Any:
    """True on the slots behind the last document of a packed buffer."""
    if is_tensor(targets):
        places = sys.modules["torch"].arange(targets.numel(), device=targets.device)
    else:
        import numpy as np

        places = np.arange(targets.size)
    return (places >= end).reshape(targets.shape)


def _pad_runs(arrays: dict[str, Any], targets: Any, batch: Batch) -> Any:
    """Length of the unbroken runs of `pad_id` at both ends of the rows, labelled slots excepted."""
    ids = arrays["input_ids"]
    real = (ids != batch.pad_id) | targets
    if batch.labels_aligned and "labels" in arrays:
        # Labels that the collator shifted: the token after a target is what it predicts, so real.
        behind = real[..., 1:]
        behind |= targets[..., :-1] & (arrays["labels"][..., :-1] == ids[..., 1:])
    length = real.shape[-1]
    rows = real.reshape(-1, length) if length else real.reshape(0, 1)
    if is_tensor(rows):
        left = (rows.cumsum(-1) == 0).sum()
        right = (rows.flip(-1).cumsum(-1) == 0).sum()
        return left + right - length * (~rows.any(-1)).sum()
    import numpy as np

    ends = rows.argmax(-1) + rows[:, ::-1].argmax(-1)
    return int(np.where(rows.any(-1), ends, length).sum())

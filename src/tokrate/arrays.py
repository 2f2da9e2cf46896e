"""Arrays of either kind, numpy or a torch tensor, and the checks that they belong together.

torch is never imported here: whoever passes a tensor has imported it.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

from tokrate.errors import CountingError

WHOLE_NUMBERS = ("labels", "input_ids", "cu_seqlens")


def on_host(tensor: Any) -> bool:
    """Whether numpy can look at the tensor; all others are counted where they lie, never read."""
    return bool(tensor.is_cpu)


def is_tensor(array: Any) -> bool:
    """Whether the array is a torch tensor, to be counted on its own device."""
    return hasattr(array, "detach")


def as_array(name: str, value: Any) -> Any:
    """A numpy view of CPU data, or the tensor itself when it lies on another device.

    Raises:
        CountingError: A ragged list, values that are no numbers, or no dimension at all.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        array = _from_tensor(name, value, torch)
    else:
        array = _from_host(name, value)
    if not array.shape:
        raise CountingError(f"{name} is a single number: expected one value for each slot")
    if name in WHOLE_NUMBERS and is_float(array) and size_of(array):
        raise CountingError(f"{name} holds {array.dtype} values: expected whole numbers")
    return array


def plain_view(value: Any) -> Any:
    """The numpy view of a plain tensor on the host; None for everything else, whatever is wrong."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or not on_host(value):
        return None
    try:
        return value.numpy()
    except (RuntimeError, TypeError):  # nested, sparse, bfloat16, or with a gradient
        return None


def _from_host(name: str, value: Any) -> Any:
    import numpy as np

    try:
        array = np.asarray(value)
        if array.size == 0 and not isinstance(value, np.ndarray):
            array = array.astype(np.int64)  # an empty list has no type of its own
    except (TypeError, ValueError) as error:
        raise CountingError(
            f"{name} is no rectangular array of numbers: expected a tensor, a numpy array, or "
            "nested lists with rows of one length; pad the rows first, or count them one by one"
        ) from error
    if array.dtype.kind not in "biuf":
        raise CountingError(
            f"{name} holds {array.dtype} values: expected whole numbers or booleans"
        )
    return array


def _from_tensor(name: str, tensor: Any, torch: Any) -> Any:
    if hasattr(tensor, "to_local"):  # a DTensor: count what lies on this rank, without a collective
        tensor = tensor.to_local()
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise CountingError(
            f"{name} is a {kind} tensor: expected a plain one; pass the values of all documents in "
            "one row (nested.values()) with cu_seqlens=, or a dense tensor"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not on_host(tensor):
        return tensor
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, float8: numpy has none
        return tensor.float().numpy()


def is_float(array: Any) -> bool:
    """Whether the array holds fractions."""
    return bool(array.is_floating_point() if is_tensor(array) else array.dtype.kind == "f")


def size_of(array: Any) -> int:
    """Number of values."""
    return int(array.numel() if is_tensor(array) else array.size)


def differs(array: Any, value: int) -> Any:
    """True where the array holds something else than the value."""
    if is_tensor(array):
        torch = sys.modules["torch"]
        limits = None if array.dtype is torch.bool else torch.iinfo(array.dtype)
        if limits and not limits.min <= value <= limits.max:  # torch would let it wrap around
            return array.new_ones(array.shape, dtype=torch.bool)
    return array != value


def count_true(array: Any, *, shifted: bool = False) -> Any:
    """Number of true values: an int for numpy, a 0-d int64 tensor on the array's device.

    Args:
        array: Booleans.
        shifted: Leave out the first column.
    """
    if is_tensor(array):
        return (array[..., 1:] if shifted else array).sum()  # one kernel; count_nonzero takes two
    count = sys.modules["numpy"].count_nonzero
    # The whole minus the first column is faster than a slice, which is not contiguous.
    return int(count(array) - count(array[..., :1])) if shifted else int(count(array))


def checksum(array: Any) -> Any:
    """A number that is equal for equal batches, to find ranks that were fed the same one.

    The same on host and device: an int, or a 0-d int64 tensor that nobody has to wait for. 0 for
    an array that holds one value only (all masked, say), since that would be equal for others too.
    """
    flat = array.reshape(-1)
    if is_tensor(flat):
        torch = sys.modules["torch"]
        flat = flat.to(torch.int64)
        places = torch.arange(flat.numel(), device=flat.device)
    else:
        import numpy as np

        flat = flat.astype(np.int64)
        places = np.arange(flat.size)
    # Multiply, fold, add up, all modulo 2**64, as hashes of numbers do: equal sums of unequal
    # batches must stay rare among 16,384 ranks. Odd constants, from splitmix64 (Steele, 2014).
    mixed = (flat + places * -0x61C8864680B583EB) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 29)) * -0x6B2FB644ECCEEE15
    number = ((mixed ^ (mixed >> 32)).sum() | 1) * (flat != flat[:1]).any()
    return number if is_tensor(number) else int(number)


# --- checks --------------------------------------------------------------------------------------


def check_together(arrays: dict[str, Any], *, raw_given: bool, pad_by_id: bool) -> None:
    """Refuse arrays that cannot belong to one batch.

    Raises:
        CountingError: Shapes or devices differ; the message says what to pass instead.
    """
    mask = arrays.get("attention_mask")
    # With raw= the ids may be another sequence (an encoder's), unless padding is read off them.
    free = "input_ids" if raw_given and not pad_by_id else None
    shapes = {name: a.shape for name, a in arrays.items() if name != free}
    if len(set(shapes.values())) > 1:
        if mask is not None and mask.ndim > 2:
            raise CountingError(
                f"attention_mask has shape {tuple(mask.shape)}, one value for each pair of slots: "
                "expected one for each slot; pass the mask of shape (batch, length) that came from "
                "the tokenizer or collator, or cu_seqlens=, or input_ids= with pad_id="
            )
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise CountingError(
            f"shapes differ: {found}; expected one shape for all; count sequences of different "
            "shape one by one and add the counts"
        )
    devices = {a.device for a in arrays.values()}  # numpy arrays say "cpu"
    if len(devices) > 1:
        found = ", ".join(sorted(str(device) for device in devices))
        raise CountingError(
            f"the arrays lie on different devices ({found}): expected one; "
            "count before moving the batch, or after all of it was moved"
        )


def check_mask_values(mask: Any) -> None:
    """Refuse a mask that is not 0 for padding and positive for tokens (host data only).

    Raises:
        CountingError: It holds negative values, as an additive mask does.
    """
    if not is_tensor(mask) and mask.dtype.kind in "if" and mask.size and mask.min() < 0:
        raise CountingError(
            f"attention_mask holds {mask.min()}: expected 0 for padding and 1 (or a document "
            "number) for tokens; an additive mask of 0 and -inf must be turned round first"
        )


def check_boundaries(ends: Any, targets: Any, slots: int | None) -> None:
    """Refuse `cu_seqlens` that cannot be one; with `slots` (host data only) look at its values too.

    Raises:
        CountingError: On another device than the batch, not one-dimensional, empty, not starting
            at 0, falling, or beyond the buffer.
    """
    if is_tensor(ends) and str(ends.device) != str(targets.device):
        raise CountingError(
            f"cu_seqlens lies on {ends.device} and the batch on {targets.device}: expected one "
            "device, or cu_seqlens on the CPU"
        )
    if ends.ndim != 1 or size_of(ends) == 0:
        raise CountingError(
            f"cu_seqlens has shape {tuple(ends.shape)}: expected (documents + 1,), starting with 0"
        )
    if slots is None or is_tensor(ends):
        return
    if ends[0] != 0 or (ends[1:] < ends[:-1]).any() or ends[-1] > slots:
        raise CountingError(
            f"cu_seqlens runs from {ends[0]} to {ends[-1]} over a buffer of {slots} slots: "
            "expected cumulative lengths that start at 0, never fall and end within the buffer"
        )


def check_token(name: str, value: Any) -> int:
    """A token id or label as a plain int.

    Raises:
        CountingError: It is no whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise CountingError(
            f"{name}={value!r}: expected a whole number, such as {name}=-100"
        ) from None

"""Finds what would make a training loop wait for its device, on a machine that has none.

On a real device each of these copies to the host or needs a size that only the device knows, so
the host waits until all that was queued before is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tokrate import arrays

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__index__", "__float__"}
"""Methods that hand values to Python. `tolist` and `numpy` never reach the dispatcher on a CPU."""
DATA_DEPENDENT = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "_unique2",
    "repeat_interleave",
    "bincount",
}
MASKS = (torch.bool, torch.uint8)


class Stall(AssertionError):
    """Something would have waited for the device."""


class _Reads(TorchFunctionMode):
    """Notes every method that hands values to Python."""

    def __init__(self, stalls: list[str]) -> None:
        self.stalls = stalls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.stalls.append(name)
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    """Notes every kernel, and those that stall."""

    def __init__(self, stalls: list[str], kernels: list[str]) -> None:
        super().__init__()
        self.stalls = stalls
        self.kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if not func.is_view:
            self.kernels.append(name)
        by_mask = name == "index" and any(i is not None and i.dtype in MASKS for i in args[1])
        # A change of dtype copies within the device; naming a device may copy out of it.
        copied = name == "copy_" or (name == "_to_copy" and kwargs.get("device") is not None)
        if name in DATA_DEPENDENT or by_mask or copied:
            self.stalls.append(name)
        return func(*args, **kwargs)


class Watch:
    """What happened within `with Watch() as watch`."""

    def __init__(self) -> None:
        self.stalls: list[str] = []
        self.kernels: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_Reads(self.stalls))
        self._stack.enter_context(_Kernels(self.stalls, self.kernels))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@contextmanager
def no_stall() -> Iterator[Watch]:
    """Fail when anything inside would have waited for the device.

    Raises:
        Stall: It names what.
    """
    with Watch() as watch:
        yield watch
    if watch.stalls:
        raise Stall(", ".join(watch.stalls))


@contextmanager
def as_if_on_a_device() -> Iterator[None]:
    """Tensors of the CPU are counted the way that tensors of a device are."""
    kept, arrays.on_host = arrays.on_host, lambda tensor: False
    try:
        yield
    finally:
        arrays.on_host = kept

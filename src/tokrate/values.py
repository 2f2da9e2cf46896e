"""Values and steps: turned once into plain Python numbers, the same for every tracker."""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any

from tokrate.errors import ValueRefused

MAX_STEP = 2**63 - 1
"""Largest step that all trackers hold."""


def to_number(value: Any) -> int | float:
    """A plain `int` or `float`; NaN and inf are data and pass.

    Raises:
        ValueRefused: A string, None, several values, a complex number, or beyond float's range.

    >>> to_number(True), to_number(2.5)
    (1, 2.5)
    """
    kind = type(value)
    if kind is float:
        return value  # type: ignore[no-any-return]
    if kind is not int:
        value = _unwrap(value)
    if type(value) is int and abs(value) > sys.float_info.max:
        raise ValueRefused(
            f"a whole number of {value.bit_length()} bits: expected at most "
            f"{sys.float_info.max:.3g}, which is the largest that a tracker can show"
        )
    return value  # type: ignore[no-any-return]


def _unwrap(value: Any) -> int | float:
    """Look inside numpy scalars, 0-d and one-element tensors, decimals and fractions."""
    found = value
    if callable(item := getattr(value, "item", None)):
        try:
            found = item()
        except (RuntimeError, TypeError, ValueError):
            shape = tuple(getattr(value, "shape", ()))
            raise ValueRefused(
                f"{type(value).__name__} of shape {shape}: expected one number; log its mean or "
                "its parts under names of their own"
            ) from None
    if isinstance(found, numbers.Integral):
        return int(found)
    if isinstance(found, numbers.Real) or (
        hasattr(found, "__float__") and not isinstance(found, str | bytes)
    ):
        return float(found)
    raise ValueRefused(f"{value!r:.80} ({type(value).__name__}): expected a number")


def to_step(step: Any) -> int:
    """A plain `int` from 0 to 2**63 - 1.

    Raises:
        ValueRefused: A float, a negative or a larger number.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise ValueRefused(
            f"step {step!r:.80} ({type(step).__name__}): expected a whole number from 0 to 2**63-1"
        )
    return number

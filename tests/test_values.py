"""Values and steps from outside, turned into plain numbers once."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tokrate.errors import ValueRefused
from tokrate.values import to_number, to_step


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (True, 1),
        (2.5, 2.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), 1),
        (np.array(4), 4),
        (np.array([4.5]), 4.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor([2]), 2),
        (torch.tensor(True), 1),
        (torch.tensor(0.25, requires_grad=True), 0.25),
        (Decimal("1.5"), 1.5),
        (Fraction(1, 4), 0.25),
        (math.inf, math.inf),
        (2**62, 2**62),
    ],
)
def test_numbers(value: Any, number: float) -> None:
    """Every number that people log becomes a Python int or float of the same value."""
    found = to_number(value)
    assert found == number
    assert type(found) is type(number)


def test_nan_is_data() -> None:
    """NaN says that training broke: it passes."""
    assert math.isnan(to_number(torch.tensor(math.nan)))


@pytest.mark.parametrize("value", ["3", None, [1], {}, 1j, torch.ones(2), np.ones((2, 2)), b"3"])
def test_no_numbers(value: Any) -> None:
    """What is no single number is refused in words."""
    with pytest.raises(ValueRefused, match="expected"):
        to_number(value)


def test_number_beyond_floats() -> None:
    """A whole number that no tracker can show is refused, not turned into inf."""
    with pytest.raises(ValueRefused, match="1329 bits"):
        to_number(10**400)


@pytest.mark.parametrize("step", [0, 2**63 - 1, np.int64(5), torch.tensor(3)])
def test_steps(step: Any) -> None:
    """Whole numbers of any kind become Python ints."""
    assert type(to_step(step)) is int
    assert to_step(step) == int(step)


@pytest.mark.parametrize("step", [-1, 1.0, 2**63, True, "1", None, torch.tensor(1.0)])
def test_no_steps(step: Any) -> None:
    """A negative, float or too large step would be wrapped or cut by some tracker."""
    with pytest.raises(ValueRefused, match=r"0 to 2\*\*63-1"):
        to_step(step)

"""Any configuration becomes plain values, and nothing in it can raise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from tokrate.plain import flat, plain
from tokrate.testing.points import HOSTILE_CONFIG


class Colour(Enum):
    """A choice, as configurations have them."""

    RED = "red"


@dataclass
class Optimizer:
    """A structured configuration."""

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (2**70, 2**70),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (Path("/data/x"), "/data/x"),
        (Colour.RED, "red"),
        (Optimizer(), {"lr": 0.1, "betas": [0.9, 0.95]}),
        ({3, 1, 2}, [1, 2, 3]),
        ({1: {None: "x"}}, {"1": {"None": "x"}}),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([1, 2]), "[1 2]"),
        (b"\xff", "b'\\xff'"),
        (range(3), [0, 1, 2]),
    ],
)
def test_values_become_plain(value: Any, expected: Any) -> None:
    """Each kind of value has the JSON form that a person would write for it."""
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


def test_omegaconf_nodes_are_read_with_their_gaps() -> None:
    """Interpolations are resolved; a missing value says so and takes no other with it."""
    node = OmegaConf.create({"a": 1, "b": "${a}", "c": "???", "d": "${nowhere}", "e": [1, "${a}"]})
    assert plain(node) == {
        "a": 1,
        "b": 1,
        "c": "<MissingMandatoryValue>",
        "d": "<InterpolationKeyError>",
        "e": [1, 1],
    }


def test_a_cycle_ends() -> None:
    """A configuration that contains itself is cut where it gets too deep."""
    config: dict[str, Any] = {"x": 1}
    config["self"] = config
    assert json.loads(json.dumps(plain(config)))["self"]["self"]["x"] == 1


def test_the_worst_configuration_is_json() -> None:
    """What the conformance suite throws at backends can be written as strict JSON."""
    text = json.dumps(plain(HOSTILE_CONFIG), allow_nan=False)
    assert json.loads(text)["object"] == "<_Odd: RuntimeError>"


def test_flat_keys_are_dotted() -> None:
    """Nested mappings give dotted keys; lists and empty mappings are leaves."""
    config = {"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}], "": 3}
    assert flat(config) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}], "": 3}

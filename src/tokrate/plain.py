"""Turns a run's configuration, whatever is in it, into plain JSON values and flat keys."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

DEEPEST = 20
"""Levels that are kept as structure; what lies deeper (or in a cycle) becomes its text."""


def plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON can hold it: dicts with text keys, lists, text, finite numbers, None.

    Nothing is dropped: what JSON cannot hold (a path, a tensor, NaN, an object) becomes its text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, Enum):
        return plain(value.value, depth + 1)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return _structure(value, depth)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of `plain(config)` under dotted keys: `{"a": {"b": 1}}` gives `{"a.b": 1}`."""
    return {
        key: leaf for name, value in plain(config).items() for key, leaf in _leaves(value, name)
    }


def _structure(value: Any, depth: int) -> Any:
    if depth >= DEEPEST:
        return _text(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    argparse = sys.modules.get("argparse")  # whoever has a Namespace has imported it
    if argparse is not None and isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {_unicode(str(key)): plain(_item(value, key), depth + 1) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(_item(value, i), depth + 1) for i in range(len(value))]
    if isinstance(value, Set):
        return sorted((plain(item, depth + 1) for item in value), key=str)
    return _scalar(value, depth)


def _scalar(value: Any, depth: int) -> Any:
    """A number of numpy or torch as a Python number, everything else as text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return plain(item(), depth + 1)
        except Exception:  # noqa: BLE001 - an array of several, or a method of another meaning
            return _text(value)
    return _text(value)


def _item(container: Any, key: Any) -> Any:
    """One item; an OmegaConf value that is missing or cannot be interpolated says so."""
    try:
        return container[key]
    except Exception as error:  # noqa: BLE001 - a config node runs code of its own
        return f"<{type(error).__name__}>"


def _text(value: Any) -> str:
    try:
        return _unicode(str(value))
    except Exception as error:  # noqa: BLE001 - somebody's __str__
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _unicode(text: str) -> str:
    r"""The text as UTF-8 can hold it: an undecodable byte of a file name is spelt `\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    else:
        yield path, value

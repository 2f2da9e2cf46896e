"""Adapters to training frameworks: one module each, importable only with its package."""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger("tokrate")

KNOWN = {
    "transformers": ("5.24", "4.57", "6"),
    "trl": ("1.16", "1.16", "2"),
    "accelerate": ("1.15", "1.15", "2"),
    "lightning": ("2.6", "2.5", "3"),
    "torchtune": ("0.6.1", "0.6.1", "0.7"),
    "torchtitan": ("0.3.0", "0.3", "0.4"),
    "ray": ("2.60", "2.60", "3"),
}
"""Package → the version that the tests train with, the first that is expected to work as it does,
and the first that is not."""

_said: set[str] = set()


def check_version(package: str) -> None:
    """Say so, once, where the package is of a version with which its adapter may not work."""
    tested, first, below = KNOWN[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        return
    if not _numbers(first) <= _numbers(found) < _numbers(below) and package not in _said:
        _said.add(package)
        log.warning(
            f"{package} {found} is not known to work: tokrate was tested with {package} {tested}, "
            f"and >= {first} and < {below} is expected to do as well; compare a few counts by "
            f"hand, or pip install '{package}>={first},<{below}'"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version as numbers: `5.24.0rc1` is (5, 24, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()

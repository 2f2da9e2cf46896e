"""How far reading is, for whoever shows it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called often, and cheaply."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Say how much of what is done; `total` is None where nobody knows."""


def silent(what: str, done: int, total: int | None) -> None:
    """Show nothing."""

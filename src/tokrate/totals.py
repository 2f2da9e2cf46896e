"""Totals: what a run has done so far, restarts included. Goes into any checkpoint."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tokrate.errors import StateError
from tokrate.window import Window

STATE_VERSION = 1


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over all windows of a run, over all ranks: the same numbers on each rank."""

    session: int = 1
    """How many times the run was started."""
    step: int = 0
    """Optimizer step of the last record."""
    raw: int = 0
    active: int = 0
    elapsed_s: float = 0.0

    def add(self, window: Window, step: int) -> None:
        """Take in a window that `step` closed."""
        self.step = step
        self.raw += window.raw
        self.active += window.active
        self.elapsed_s += max(window.elapsed_s, 0.0)

    def to_state(self) -> dict[str, int | float]:
        """The totals in plain numbers."""
        return {
            "version": STATE_VERSION,
            "session": self.session,
            "step": self.step,
            "total_raw_tokens": self.raw,
            "total_active_tokens": self.active,
            "total_elapsed_s": self.elapsed_s,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The totals that `to_state` was called on.

        Raises:
            StateError: The state is of another version, incomplete, or holds no counts.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise StateError(
                f"the meter state has version {version!r}: expected {STATE_VERSION}; "
                "load it with the tokrate that wrote it, or start without it"
            )
        try:
            totals = cls(
                session=operator.index(state["session"]),
                step=operator.index(state["step"]),
                raw=operator.index(state["total_raw_tokens"]),
                active=operator.index(state["total_active_tokens"]),
                elapsed_s=float(state["total_elapsed_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the meter state cannot be read ({error!r}): expected what state_dict() returned"
            ) from error
        numbers = (totals.session, totals.step, totals.raw, totals.active, totals.elapsed_s)
        if not all(0 <= number < math.inf for number in numbers):
            raise StateError(
                f"the meter state holds {totals}: expected what state_dict() returned, finite "
                "numbers of at least 0"
            )
        return totals

"""The steady state of a session: its windows in bounded memory, and the median of each number.

    record ──► not warm-up ──► SteadyWindows ──► weighted median ──► throughput/steady_active_tps

A window counts by its seconds, so that the windows may be of any length, and a stall of a few
seconds in an hour changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tokrate.record import ThroughputRecord

MOST_WINDOWS = 4096
"""Windows that are kept apart; more are merged with their neighbours (about 0.7 MB at most)."""


class SteadyWindow(NamedTuple):
    """The tokens and seconds of one window, or of several neighbours."""

    elapsed_s: float
    raw_tokens: int
    active_tokens: int
    padded_tokens: int | None

    def merged(self, other: SteadyWindow) -> SteadyWindow:
        """Both as one window; padding is known where it is known of both."""
        known = self.padded_tokens is not None and other.padded_tokens is not None
        return SteadyWindow(
            self.elapsed_s + other.elapsed_s,
            self.raw_tokens + other.raw_tokens,
            self.active_tokens + other.active_tokens,
            (self.padded_tokens or 0) + (other.padded_tokens or 0) if known else None,
        )


class SteadyWindows:
    """Collects the windows of a session that are not warm-up.

    Args:
        most: Windows to keep, an even number; when there are so many, neighbours become one.
    """

    def __init__(self, most: int = MOST_WINDOWS) -> None:
        self._most = most
        self._windows: list[SteadyWindow] = []
        self._per_place = 1
        self._open: SteadyWindow | None = None
        self._in_open = 0
        self.last_step: int | None = None
        """Step of the last window that counted; None while there is none."""

    def add(self, record: ThroughputRecord) -> None:
        """Take in a record, unless it is warm-up or has no speed."""
        if record.warmup or record.active_tps is None or not 0 < record.elapsed_s < math.inf:
            return
        window = SteadyWindow(
            record.elapsed_s, record.raw_tokens, record.active_tokens, record.padded_tokens
        )
        self.last_step = record.step
        self._open = window if self._open is None else self._open.merged(window)
        self._in_open += 1
        if self._in_open == self._per_place:
            self._windows.append(self._open)
            self._open, self._in_open = None, 0
        if len(self._windows) == self._most:
            self._halve()

    def values(self) -> dict[str, float]:
        """The steady values by the names in `STEADY`; unknown ones are left out."""
        windows = [*self._windows, *([self._open] if self._open is not None else [])]
        return steady_values(windows)

    def _halve(self) -> None:
        """Each two neighbours become one, and from now on places take twice as many windows."""
        pairs = zip(self._windows[::2], self._windows[1::2], strict=True)
        self._windows = [first.merged(second) for first, second in pairs]
        self._per_place *= 2


def steady_values(windows: Iterable[SteadyWindow]) -> dict[str, float]:
    """The median of each number over the windows, weighted by their seconds.

    >>> steady_values([SteadyWindow(2.0, 8, 4, 2), SteadyWindow(1.0, 8, 4, 2)])["steady_raw_tps"]
    4.0
    """
    kept = list(windows)
    found: dict[str, float] = {}
    for name, number_of in _NUMBERS.items():
        known = [(v, w.elapsed_s) for w in kept if (v := number_of(w)) is not None]
        if known:
            found[name] = weighted_median([v for v, _ in known], [weight for _, weight in known])
    return found


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value in the middle of the weight; where that is between two, their mean.

    >>> weighted_median([1.0, 2.0, 9.0], [1.0, 1.0, 1.0]), weighted_median([1.0, 2.0], [1.0, 1.0])
    (2.0, 1.5)
    >>> weighted_median([1.0, 2.0, 9.0], [1.0, 1.0, 3.0])
    9.0

    Args:
        values: At least one.
        weights: Above 0, one for each value.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    until = list(accumulate(weights[place] for place in order))
    half = until[-1] / 2
    for number, place in enumerate(order):
        if math.isclose(until[number], half, rel_tol=1e-9) and number + 1 < len(order):
            return (values[place] + values[order[number + 1]]) / 2
        if until[number] > half:
            return values[place]
    return values[order[-1]]


def _padded_frac(window: SteadyWindow) -> float | None:
    if window.padded_tokens is None or not window.raw_tokens:
        return None
    return window.padded_tokens / window.raw_tokens


def _masked_frac(window: SteadyWindow) -> float | None:
    if window.padded_tokens is None or not window.raw_tokens:
        return None
    masked = window.raw_tokens - window.active_tokens - window.padded_tokens
    return masked / window.raw_tokens


_NUMBERS: Mapping[str, Callable[[SteadyWindow], float | None]] = {
    "steady_active_tps": lambda window: window.active_tokens / window.elapsed_s,
    "steady_raw_tps": lambda window: window.raw_tokens / window.elapsed_s,
    "steady_padded_frac": _padded_frac,
    "steady_masked_frac": _masked_frac,
}

STEADY: tuple[str, ...] = tuple(_NUMBERS)
"""Names of the values that a run has as a whole."""

"""Sums of token counts over a window: Python ints on the host, int64 on each device.

Nothing here synchronises with a device except `read`, which does so once.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from tokrate.arrays import is_tensor
from tokrate.counting import Tally


class Sums(NamedTuple):
    """Counts of one window on this rank."""

    raw: int = 0
    active: int = 0
    padded: int = 0
    """Padded slots of the batches that said something about padding."""
    unknown: int = 0
    """Slots of the batches that said nothing about padding, or contradicted themselves."""
    wrong: int = 0
    """Active targets on padded slots, as far as they were looked for."""
    lost: int = 0
    """Batches that could not be counted at all."""
    checksum: int = 0
    """Of this rank's first batch; 0 when there was none, or none was asked for."""


TALLY_PLACES = tuple(Sums._fields.index(n) for n in ("raw", "active", "padded", "wrong"))
UNKNOWN, LOST, CHECKSUM = (Sums._fields.index(n) for n in ("unknown", "lost", "checksum"))


class Accumulator:
    """Adds up the batches of a window."""

    def __init__(self) -> None:
        self._host = [0] * len(Sums._fields)
        self._device: dict[Any, Any] = {}

    def add(self, tally: Tally) -> None:
        """Add one batch; counts on a device are added there, without a synchronisation."""
        for place, value in zip(TALLY_PLACES, tally):  # noqa: B905 - of one length, and hot
            if type(value) is int:
                self._host[place] += value
            elif value is not None:
                self._add_at(place, value)
        if tally.padded is None:
            self._host[UNKNOWN] += tally.raw

    def lose(self) -> None:
        """Note a batch that could not be counted."""
        self._host[LOST] += 1

    def mark(self, checksum: Any) -> None:
        """Note the checksum of the first batch, an int or a 0-d int64 tensor."""
        self._add_at(CHECKSUM, checksum)

    def _add_at(self, place: int, value: Any) -> None:
        if is_tensor(value):
            self._sums_on(value.device)[place].add_(value)  # `+=` would copy the sum back as well
        else:
            self._host[place] += value

    def _sums_on(self, device: Any) -> Any:
        if device not in self._device:
            torch = sys.modules["torch"]
            # int64: a float32 sum stops counting at 2**24 tokens, an int32 one at 2**31.
            self._device[device] = torch.zeros(len(Sums._fields), dtype=torch.int64, device=device)
        return self._device[device]

    def read(self) -> Sums:
        """The sums so far; waits for the devices once."""
        total = list(self._host)
        for sums in self._device.values():
            total = [a + b for a, b in zip(total, sums.tolist(), strict=True)]
        return Sums(*total)

    def clear(self) -> None:
        """Begin the next window."""
        self._host = [0] * len(Sums._fields)
        for sums in self._device.values():
            sums.zero_()

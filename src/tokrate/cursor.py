"""The cursor: how far a backend has come in a run's journal, kept in a small file beside it."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokrate.journal import Place

log = logging.getLogger("tokrate")


class Reached(NamedTuple):
    """How far a backend has come."""

    place: Place = Place()
    """Everything before it was dealt with."""
    refused: int = 0
    """Entries among it that were refused."""
    superseded: int = 0
    """Entries among it that were not delivered because a resumed session wrote them anew."""

    def to_json(self) -> dict[str, int]:
        """As the cursor's file holds it."""
        counts = {"refused": self.refused, "superseded": self.superseded}
        return {**self.place._asdict(), **counts}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Reached:
        """The inverse; raises what a damaged file deserves."""
        place = Place(int(saved["offset"]), int(saved["entries"]))
        return cls(place, int(saved["refused"]), int(saved["superseded"]))


class Cursor:
    """How far a backend has come, kept in a small file beside the journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._moves: deque[tuple[float, Reached]] = deque()
        self.reached = Reached()
        self._settled = Reached()
        self.ended_session = 0
        """Session whose end the tracker was told."""
        if path.exists():
            try:
                saved = json.loads(path.read_text())
                self.reached = Reached.from_json(saved)
                self._settled = Reached.from_json(saved["settled"])
                self.ended_session = int(saved["ended_session"])
            except (ValueError, KeyError, TypeError):
                self.reached = self._settled = Reached()
                # Better twice than never: trackers keep equal points once.
                log.warning(f"{path} cannot be read; delivering the run from its first entry")

    def go_back(self) -> None:
        """Before a delivery after a sudden end: only what has settled is sure to be there."""
        self.reached = self._settled

    def move(
        self, place: Place, refused: int, superseded: int, *, now_s: float, settle_s: float
    ) -> None:
        """Remember that everything before the place was dealt with; raises OSError.

        Args:
            place: The new place.
            refused: How many entries of this step were refused.
            superseded: How many were superseded.
            now_s: Reading of the clock.
            settle_s: Seconds until what was delivered is safe with the tracker.
        """
        before = self.reached
        self.reached = Reached(place, before.refused + refused, before.superseded + superseded)
        self._moves.append((now_s, self.reached))
        while self._moves and self._moves[0][0] <= now_s - settle_s:
            self._settled = self._moves.popleft()[1]
        self._save()

    def end(self, session: int) -> None:
        """Remember that the tracker was told how the session ended; raises OSError."""
        self.ended_session, self._settled = session, self.reached
        self._save()

    def _save(self) -> None:
        settled = {"settled": self._settled.to_json(), "ended_session": self.ended_session}
        self._path.parent.mkdir(exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self.reached.to_json() | settled))
        fresh.replace(self._path)

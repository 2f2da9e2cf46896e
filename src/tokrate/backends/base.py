"""The seam between delivery and the trackers: everything a backend must do.

journal ──► delivery ──► Backend.write(entries) ──► tracker
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from tokrate.run import Entry, Outcome

__all__ = ["Backend", "BackendFactory", "CountsLeftOut", "Entry", "Outcome", "Settles"]


class Backend(Protocol):
    """Writes entries to one tracker. Used by one thread at a time.

    A backend is opened by its factory, `factory(run: RunInfo, **options)`, in the main thread
    before training starts. The factory checks the options (raising `ConfigError`) and returns at
    once; what is slow, such as reaching a server, belongs into the first `write`.
    """

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the entries, in order; an empty sequence only makes the connection.

        Writing entries again that were written before must be harmless where the tracker allows it.

        Raises:
            BackendError: with `retryable=True` for an outage (the same entries come again later),
                with `retryable=False` when they will never be accepted.
        """

    def close(self, outcome: Outcome) -> None:
        """Flush, tell the tracker how the run ended, let go. Calling it again does nothing."""


@runtime_checkable
class Settles(Protocol):
    """A backend whose tracker may still lose what `write` returned from, if its process is killed.

    After a sudden end the entries of so many seconds before it are written again.
    """

    settle_s: ClassVar[float]
    """Seconds after which an entry that was written is safe."""


@runtime_checkable
class CountsLeftOut(Protocol):
    """A backend that must leave some values out (its tracker cannot show them) says how many."""

    @property
    def left_out(self) -> Mapping[str, int]:
        """Reason to number of values left out so far, such as `{"inf": 3}`."""


BackendFactory = Callable[..., Backend]
"""Called as `factory(run, **options)`."""

"""Time of a window: training, phases that are not training, and waiting for data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

Batch = TypeVar("Batch")


class Lap(NamedTuple):
    """What passed since the window began, in seconds."""

    now: float
    elapsed_s: float
    """Negative when the clock ran backwards."""
    paused_s: float
    data_wait_s: float | None


class Stopwatch:
    """Splits the clock's time into training, phases and data wait.

    Args:
        clock: Returns seconds, never running backwards, such as `time.perf_counter`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.restart(clock())

    def restart(self, now: float) -> None:
        """Begin a window now. A phase that is open goes on and pauses the new window too."""
        self._began = now
        self._paused_s = 0.0
        self._wait_s: float | None = None
        self._phases = getattr(self, "_phases", 0)
        self._phase_began = now

    @property
    def paused(self) -> bool:
        """Whether a phase is open."""
        return self._phases > 0

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Time inside belongs to no window. Phases nest; the outermost one counts."""
        if not self._phases:
            self._phase_began = self.clock()
        self._phases += 1
        try:
            yield
        finally:
            self._phases -= 1
            if not self._phases:
                self._paused_s += self.clock() - self._phase_began

    def lap(self) -> Lap:
        """What passed so far, without ending the window."""
        now = self.clock()
        paused_s = self._paused_s + (now - self._phase_began if self.paused else 0.0)
        elapsed_s = now - self._began - paused_s
        # A clock that ran backwards within a phase must not turn into time of training.
        return Lap(now, elapsed_s if paused_s >= 0 else paused_s, paused_s, self._wait_s)

    def waited(self, seconds: float) -> None:
        """Add time that training spent waiting for data; not counted inside a phase."""
        if not self.paused:
            self._wait_s = (self._wait_s or 0.0) + seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside is spent waiting for data."""
        before = self.clock()
        try:
            yield
        finally:
            self.waited(self.clock() - before)


class WatchedLoader(Generic[Batch]):
    """A loader whose batches come through, while the wait for each is measured.

    Args:
        loader: Any iterable of batches.
        stopwatch: What the wait is added to.
        receive: Takes each batch as it came and returns what the loop is handed.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        stopwatch: Stopwatch,
        receive: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self._loader = loader
        self._stopwatch = stopwatch
        self._receive = receive

    def __iter__(self) -> Iterator[Batch]:
        clock = self._stopwatch.clock
        before = clock()
        for batch in self._loader:
            self._stopwatch.waited(clock() - before)
            yield self._receive(batch)
            before = clock()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

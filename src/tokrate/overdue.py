"""Says when a wait takes too long, while it is still going on.

One thread for each process looks at the open waits from time to time. To open and close one costs
a microsecond; a `threading.Timer` for each would cost more than the collective that is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

OVERDUE_S = 60.0
"""A wait is said to be overdue after this time, or up to twice as late."""

log = logging.getLogger("tokrate")
_waits: dict[object, str] = {}
_watcher: threading.Thread | None = None


@contextmanager
def said_when_overdue(message: str) -> Iterator[None]:
    """Warn once if what is inside takes longer than `OVERDUE_S`."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # a fork leaves it behind
        _watcher = threading.Thread(target=_watch, name="tokrate-overdue", daemon=True)
        _watcher.start()
    wait = object()
    _waits[wait] = message
    try:
        yield
    finally:
        del _waits[wait]


def _watch() -> None:
    before: dict[object, str] = {}
    said: set[object] = set()
    while True:
        time.sleep(OVERDUE_S)
        now = _waits.copy()
        for wait in (now.keys() & before.keys()) - said:
            log.warning(now[wait])
            said.add(wait)
        before, said = now, said & now.keys()

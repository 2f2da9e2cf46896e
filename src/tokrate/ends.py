"""How a process ends: found out once, told to every logger that is still open.

    exception, Ctrl-C ──► sys.excepthook ─┐
    sys.exit(3)       ──► sys.exit       ─┼─► atexit ──► close(outcome)
    SIGTERM           ──► signal handler ─┘

Whatever was installed before is called as well, and is put back when the last logger closes.
SIGKILL and `os._exit` leave no time for anything: the journal is complete all the same, and
`tokrate sync` tells the end.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from tokrate.run import Outcome

Close = Callable[[Outcome | None], object]

_open: dict[int, Close] = {}
"""Key to what closes a logger, in the order in which they were opened."""
_found: dict[str, Outcome | None] = {"killed": None, "ending": None}
_lock = threading.RLock()


def killed() -> Outcome | None:
    """The outcome after a SIGTERM, also while a handler of the user's lets the loop go on."""
    return _found["killed"]


def outcome_of(error: BaseException | None) -> Outcome:
    """How a run ended that this exception ended (None: it came to its end)."""
    if error is None:
        return Outcome.FINISHED
    if isinstance(error, KeyboardInterrupt):
        return Outcome("killed", 128 + signal.SIGINT)
    if isinstance(error, SystemExit):
        return _outcome_of_code(error.code)
    return Outcome.FAILED


def watch(key: int, close: Close) -> None:
    """Have `close` called when the process ends, whichever way."""
    global _hooks
    # Trackers import it when they are first reached. In a process that has ended by then, that
    # import fails, and the tracker with it.
    import concurrent.futures.thread  # noqa: F401

    with _lock:
        if not _open:
            _found.update(killed=None, ending=None)
            _hooks = _Hooks()
            atexit.register(_close_all)
        _open[key] = close


def unwatch(key: int) -> None:
    """Forget a logger that is closed; after the last one, put back what was there before."""
    with _lock:
        if _open.pop(key, None) is not None and not _open:
            atexit.unregister(_close_all)
            if _hooks is not None:
                _hooks.put_back()


def needs_word(key: int) -> None:
    """Take a logger for failed that is open at the end, however well the process itself ended.

    For whoever is told when training has come to its end, but not when an exception has ended it.
    """
    with _lock:
        if (close := _open.get(key)) is not None:
            _open[key] = lambda found: close(
                Outcome.FAILED if found in (None, Outcome.FINISHED) else found
            )


def come_first() -> None:
    """Run before exit handlers that trackers registered since, so that they still work then."""
    with _lock:
        if _open:
            atexit.unregister(_close_all)
            atexit.register(_close_all)


def _close_all() -> None:
    for close in list(_open.values()):
        close(_found["killed"] or _found["ending"])


class _Hooks:
    """One installation; each remembers what it covered.

    So a hook that somebody put over an old one, and that still calls it, never leads in a circle.
    """

    def __init__(self) -> None:
        self._excepthook, self._exit, self._sigterm = self.excepthook, self.exit, self.sigterm
        self._excepthook_before, sys.excepthook = sys.excepthook, self._excepthook
        self._exit_before: Callable[..., Any] = sys.exit
        sys.exit = self._exit
        self._sigterm_before: Any = None
        if _in_main_thread():
            self._sigterm_before = signal.signal(signal.SIGTERM, self._sigterm)

    def put_back(self) -> None:
        """Put back what was there, unless somebody else has put something over it since."""
        if sys.excepthook is self._excepthook:
            sys.excepthook = self._excepthook_before
        if sys.exit is self._exit:
            sys.exit = self._exit_before
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is self._sigterm:
            signal.signal(signal.SIGTERM, self._sigterm_before or signal.SIG_DFL)

    def excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _found["ending"] = outcome_of(error)
        self._excepthook_before(kind, error, trace)

    def exit(self, status: Any = None, /) -> Any:
        """Stands in for `sys.exit` to learn the code: no hook is told of a SystemExit."""
        if _in_main_thread():
            _found["ending"] = _outcome_of_code(status)  # only used when the process does end
        return self._exit_before(status)

    def sigterm(self, number: int, frame: FrameType | None) -> None:
        """Note the end, then do what would have been done without us.

        A handler of the user's may save a checkpoint and go on for a while, so loggers stay open
        for it; only where the process would die at once they are closed here.
        """
        _found["killed"] = Outcome("killed", 128 + number)
        if callable(self._sigterm_before):
            self._sigterm_before(number, frame)
        elif self._sigterm_before is signal.SIG_DFL:
            _close_all()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_hooks: _Hooks | None = None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _outcome_of_code(status: Any) -> Outcome:
    code = status if isinstance(status, int) else int(status is not None)
    return Outcome("failed", code) if code else Outcome.FINISHED

"""What a test leaves behind in the process is told and put back: no later test fails of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tokrate import ends

FOREIGN = {
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning
    "TORCHINDUCTOR_CACHE_DIR",  # torch
    "WANDB_SERVICE",
}
"""Environment variables that others set as they go."""
THREADS_S = 60.0
"""How long a thread may take to end, when its logger has been closed."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Before:
    """The process as a test finds it."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._folder = os.getcwd()  # noqa: PTH109 - what os.chdir takes back
        self._excepthook: Callable[..., Any] = sys.excepthook
        self._exit: Callable[..., Any] = sys.exit
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def put_back(self) -> list[str]:
        """What is there now and was not then, in words, once it is gone."""
        return [
            *_close_loggers(),  # first: the last one takes its hooks away
            *_threads(),
            *self._put_back_environment(),
            *self._put_back_folder(),
            *self._put_back_hooks(),
            *self._put_back_handlers(),
        ]

    def _put_back_environment(self) -> Iterator[str]:
        now = _environment()
        for name in sorted(now.keys() | self._environment.keys()):
            then = self._environment.get(name)
            if now.get(name) != then:
                yield f"the variable {name}={now.get(name)!r}, which was {then!r}"
                if then is None:
                    del os.environ[name]
                else:
                    os.environ[name] = then

    def _put_back_folder(self) -> Iterator[str]:
        if (now := os.getcwd()) != self._folder:  # noqa: PTH109
            yield f"the working folder {now}"
            os.chdir(self._folder)

    def _put_back_hooks(self) -> Iterator[str]:
        for name, then in (("excepthook", self._excepthook), ("exit", self._exit)):
            now = getattr(sys, name)
            if now != then:
                if not _is_theirs(now):
                    yield f"sys.{name}={now!r}"
                setattr(sys, name, then)

    def _put_back_handlers(self) -> Iterator[str]:
        for number, then in self._handlers.items():
            if (now := signal.getsignal(number)) != then:
                if not _is_theirs(now):
                    yield f"the handler {now!r} of {number.name}"
                signal.signal(number, then)


def forget_wandb() -> None:
    """Let W&B look at the environment again, and a child process start a service of its own.

    W&B reads WANDB_MODE, WANDB_API_KEY and the others once in the life of a process, so whatever
    held in the first test that used it would hold in all. And it tells child processes where this
    process's service is, which may have died.
    """
    os.environ.pop("WANDB_SERVICE", None)
    setup: Any = sys.modules.get("wandb.sdk.wandb_setup")
    if setup is not None and setup._singleton is not None:
        # `wandb.teardown` forgets them too, but with the service, which takes a second to start.
        setup._singleton._settings = None


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def _close_loggers() -> Iterator[str]:
    for close in list(ends._open.values()):
        logger = getattr(close, "__self__", None)
        yield f"an open logger of {logger.run.folder if logger else 'an integration'}"
        close(None)


def _threads() -> Iterator[str]:
    """Threads of ours that do not end.

    `close` leaves a thread to itself whose tracker keeps it beyond the deadline, so that is no
    fault of a test; and the thread that watches for overdue waits lives as long as the process.
    """
    until = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if thread.name.startswith("tokrate-") and thread.name != "tokrate-overdue":
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                yield f"the thread {thread.name}"


def _is_theirs(hook: Any) -> bool:
    """W&B's service and Ray's trainer hook themselves in, and never take it back."""
    module = getattr(type(getattr(hook, "__self__", None)), "__module__", "")
    modules = (module, getattr(hook, "__module__", None) or "")
    return not {name.partition(".")[0] for name in modules}.isdisjoint({"wandb", "ray"})

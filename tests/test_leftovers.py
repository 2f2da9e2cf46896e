"""What keeps tests apart can find what it is there for."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import leftovers
from leftovers import Before, forget_wandb
from tokrate import RunInfo, open_logger


def test_what_is_left_is_told_once_and_put_back(tmp_path: Path) -> None:
    """A logger, a variable, a folder, a hook and a handler: each is named, and then gone."""
    before = Before()
    os.environ["LEFT_BEHIND"] = "x"
    os.chdir(tmp_path)
    sys.excepthook = lambda *_: None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open_logger({"console": False}, run=RunInfo("a"), dir=tmp_path)
    left = before.put_back()
    words = ["open logger", "LEFT_BEHIND='x'", "working folder", "sys.excepthook", "SIGTERM"]
    assert [word in line for word, line in zip(words, left, strict=True)] == [True] * 5, left
    assert before.put_back() == []


def test_a_thread_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does end is waited for."""
    monkeypatch.setattr(leftovers, "THREADS_S", 0.05)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="tokrate-toy")
    thread.start()
    assert Before().put_back() == ["the thread tokrate-toy"]
    end.set()
    monkeypatch.setattr(leftovers, "THREADS_S", 60.0)
    assert Before().put_back() == []
    assert not thread.is_alive()


def test_wandb_looks_at_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so once in a process, and what one test set would hold in all others."""
    from wandb.sdk import wandb_setup

    assert str(wandb_setup.singleton().settings.mode) != "offline"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert str(wandb_setup.singleton().settings.mode) != "offline"
    forget_wandb()
    assert str(wandb_setup.singleton().settings.mode) == "offline"

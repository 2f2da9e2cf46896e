"""The end of a process after its last window: torch's own threads are waited for."""

from __future__ import annotations

import threading

import pytest
import torch

from tokrate import ranks


def test_the_end_waits_until_torch_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as anybody but Python holds a tensor of the last collective, and no longer."""
    tensor = torch.ones(2)
    view = tensor.view(-1)  # holds it as a thread of gloo's does
    monkeypatch.setattr(ranks, "_last", (tensor,))
    waiting = threading.Thread(target=ranks._wait_until_let_go)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    del view
    waiting.join(10.0)
    assert not waiting.is_alive()
    assert ranks._last == ()


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held by somebody who lives on does not keep the process."""
    tensor = torch.ones(2)
    view = tensor.view(-1)
    monkeypatch.setattr(ranks, "_last", (tensor,))
    monkeypatch.setattr(ranks, "LET_GO_S", 0.05)
    ranks._wait_until_let_go()
    assert ranks._last == ()
    assert view.numel() == 2

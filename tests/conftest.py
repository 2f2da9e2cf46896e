"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leftovers import Before, forget_wandb


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A test that leaves something behind in the process fails, and not one that comes later."""
    forget_wandb()
    before = Before()
    yield
    left = before.put_back()
    assert not left, f"this test left behind: {'; '.join(left)}"

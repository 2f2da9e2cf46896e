"""What holds for every test."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_foreign_wandb_service() -> None:
    """W&B tells child processes where this process's service is; it may have died in a test."""
    os.environ.pop("WANDB_SERVICE", None)

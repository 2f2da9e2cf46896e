"""The page of guarantees lists what the code knows."""

from __future__ import annotations

from pathlib import Path

from tokrate.redact import OWNERS, SECRET_WORDS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "guarantees.md"


def test_the_page_has_every_secret_word() -> None:
    """Each word that names a secret, and each that stands before `token`, is on the page."""
    text = PAGE.read_text(encoding="utf-8")
    assert f"| words | {', '.join(SECRET_WORDS)} |" in text
    assert f"behind {OWNERS.replace('|', ', ')};" in text

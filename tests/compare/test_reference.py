"""The reference of the output is complete: every field with its sentence, every kind of doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_docs import DOCS, field_sentences, table
from tokrate.compare import Comparison, Doubt, Factor, Ratio, RunResult
from tokrate.compare.doubts import ON_ALL, ON_ONE
from tokrate.compare.keys import DIALECTS

PAGE = DOCS / "reference" / "compare.md"


@pytest.mark.parametrize(
    ("heading", "owner"),
    [
        ("## The comparison", Comparison),
        ("## A run", RunResult),
        ("## A ratio", Ratio),
        ("## A factor", Factor),
        ("## A doubt", Doubt),
    ],
)
def test_every_field_is_explained(heading: str, owner: type) -> None:
    """In order, with the sentence of the code."""
    expected = [[name, s.replace("`", "")] for name, s in field_sentences(owner).items()]
    assert table(PAGE, heading) == expected


def test_every_doubt_is_listed() -> None:
    """By the word in `about`."""
    text = PAGE.read_text()
    for about in (*ON_ONE, *ON_ALL):
        assert f"| `{about}` |" in text, about


def test_every_foreign_name_is_listed() -> None:
    """`old-runs.md` has each name that is read, but for those that tokrate itself writes."""
    text = Path(DOCS / "how-to" / "old-runs.md").read_text()
    own = {"throughput_tps", "throughput/device_tokens_per_sec", "throughput/device/mfu"}
    for dialect in DIALECTS:
        for key in dialect.keys:
            assert key in own or f"`{key}`" in text, key

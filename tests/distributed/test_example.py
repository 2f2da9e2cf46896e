"""The example for many ranks, run as a user runs it."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

from launching import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"
RECORD_LINE = re.compile(r"^ +4 +[\d,]+ +[\d,]+ ", re.MULTILINE)


def test_one_record_line_and_not_four(tmp_path: Path) -> None:
    """Four ranks train; one line is printed and one journal has the tokens of all of them."""
    output = torchrun(EXAMPLE, str(tmp_path), ranks=4)
    assert len(RECORD_LINE.findall(output)) == 1, output
    (journal,) = tmp_path.rglob("journal.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "entry", "end"]
    record = lines[1]["record"]
    assert (record["step"], record["devices"]) == (4, 4)
    lengths = [len(document) - 1 for document in runpy.run_path(str(EXAMPLE))["make_documents"]()]
    assert record["active_tokens"] == sum(lengths)  # each document once, on one of the ranks
    widths = [max(lengths[rank::4][row : row + 4]) for rank in range(4) for row in range(0, 16, 4)]
    assert record["raw_tokens"] == 4 * sum(widths)

"""The comparison as JSON, Markdown or CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from tokrate.compare.report.cells import COLUMNS, factor_rows
from tokrate.compare.result import Comparison, RunResult

FORMAT_VERSION = 1
CSV_RATIO = ("of", "ratio", "low", "high")
CSV_FACTORS = ("raw", "unpadded", "unmasked", "active_share", "busy", "fed")
CSV_COLUMNS = (
    *(f.name for f in fields(RunResult) if f.name != "versus"),
    *(f"ratio_{name}" if name != "ratio" else name for name in CSV_RATIO),
    *(f"factor_{name}" for name in CSV_FACTORS),
)


def as_json(found: Comparison) -> str:
    """Everything, as JSON; unknown is null."""
    return _dump({"version": FORMAT_VERSION, **asdict(found)})


def runs_as_json(runs: Sequence[RunResult]) -> str:
    """The list of runs, as JSON."""
    return _dump({"version": FORMAT_VERSION, "runs": [asdict(run) for run in runs]})


def _dump(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)


def as_csv(found: Comparison) -> str:
    """One line for each run; unknown is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in found.runs:
        row = {key: v for key, v in asdict(run).items() if key != "versus"}
        row["sources"] = " ".join(run.sources)
        if (versus := run.versus) is not None:
            row |= {"ratio_of": versus.of, "ratio": versus.ratio}
            row |= {"ratio_low": versus.low, "ratio_high": versus.high}
            row |= {f"factor_{f.name}": f.ratio for f in (*versus.factors, *versus.split)}
        writer.writerow(row)
    return out.getvalue().rstrip("\n")


def as_markdown(found: Comparison) -> str:
    """The tables and sentences, for a pull request or a report."""
    lines = [
        _line([column.title for column in COLUMNS]),
        _line(["---" if column.title == "run" else "---:" for column in COLUMNS]),
        *(_line([_escaped(column.cell(run)) for column in COLUMNS]) for run in found.runs),
    ]
    if causes := factor_rows(found.runs):
        lines += ["", _line(["run", "ratio", "why"]), _line(["---", "---:", "---"])]
        lines += [_line([_escaped(cell) for cell in row]) for row in causes]
    lines += ["", *(f"- {_escaped(sentence)}" for sentence in found.sentences)]
    if found.doubts:
        lines += ["", "Doubts:", ""]
        lines += [f"- {_escaped(doubt.text)}" for doubt in found.doubts]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text that a name cannot turn into markup."""
    for mark in "\\|`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")

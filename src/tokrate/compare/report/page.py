"""The comparison as one page of HTML that asks nobody for anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from tokrate.compare.report.bars import draw_bars
from tokrate.compare.report.cells import COLUMNS
from tokrate.compare.report.curves import COLOURS, Curve, curve_of, draw_curves
from tokrate.compare.result import Comparison
from tokrate.compare.same import Run
from tokrate.errors import CompareError

MOST_CURVES = 16
"""Runs that are drawn; the table has all."""
CHARTS = (("active_tps", "Active tokens per second"), ("raw_tps", "Slots per second"))


def check_target(path: Path) -> None:
    """See that the page can be written, before anything is read.

    Raises:
        CompareError: It cannot.
    """
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise CompareError(
            f"--html {path}: expected the name of a file in a folder that exists and may be "
            "written to"
        )


def write_page(found: Comparison, runs: Sequence[Run], path: Path) -> None:
    """Write the page, whole or not at all.

    Args:
        found: The comparison.
        runs: The runs that it was made of, for the curves.
        path: File to write; one that is there is replaced.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(make_page(found, runs), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CompareError(f"--html {path}: cannot be written ({error.strerror})") from error


def make_page(found: Comparison, runs: Sequence[Run]) -> str:
    """The page as text."""
    parts = files("tokrate.compare.report")
    style = parts.joinpath("page.css").read_text(encoding="utf-8")
    script = parts.joinpath("page.js").read_text(encoding="utf-8")
    title = f"{found.reference} and {len(found.runs) - 1} more"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>tokrate: {escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>How fast, and why</h1>
{_list("said", found.sentences)}
{_table(found)}
<p class="note">Steady state: without the first window of each session and marked warm-up.
active = raw × unpadded × unmasked. ≈ marks a ratio whose interval holds 1.</p>
{_section(f"Why, against {found.reference}", draw_bars(found.runs))}
{_charts(found, runs)}
{_section("Doubts", _list("doubts", [doubt.text for doubt in found.doubts]))}
</main>
<script>
{script}</script>
</body>
</html>
"""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _list(name: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{name}">{items}</ul>' if items else ""


def _table(found: Comparison) -> str:
    """The table of runs; on a narrow screen each run becomes a card, with the titles inside."""
    head = "".join(f"<th scope=col>{escape(column.title)}</th>" for column in COLUMNS)
    rows = []
    for number, run in enumerate(found.runs):
        name, *rest = COLUMNS
        cells = "".join(
            f'<td data-title="{escape(column.title)}">{escape(column.cell(run))}</td>'
            for column in rest
        )
        dot = f'<i class="dot c{number % COLOURS}"></i>'
        rows.append(f"<tr><th scope=row>{dot}{escape(name.cell(run))}</th>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _charts(found: Comparison, runs: Sequence[Run]) -> str:
    by_label = {run.label: run.series for run in runs}
    shown = [(number, run) for number, run in enumerate(found.runs)][:MOST_CURVES]
    drawn = []
    for rate, title in CHARTS:
        for over in ("steps", "tokens"):
            curves: list[Curve] = []
            for number, run in shown:
                series = by_label[run.label]
                column = rate if series.knows(rate) else f"{rate}_per_device"
                curves.append(curve_of(series, run.label, number, column, over))
            axis = "optimizer steps" if over == "steps" else "active tokens so far"
            if svg := draw_curves(curves, f"{title} over {axis}", axis):
                hidden = "" if over == "steps" else " hidden"
                drawn.append(f'<figure class="chart" data-over="{over}"{hidden}>')
                drawn.append(f"<figcaption>{title}</figcaption>{svg}</figure>")
    if not drawn:
        return ""
    legend = "".join(
        f'<button type=button data-run="{number}" aria-pressed=true>'
        f'<i class="dot c{number % COLOURS}"></i>{escape(run.label)}</button>'
        for number, run in shown
    )
    more = len(found.runs) - len(shown)
    note = f'<p class="note">The first {len(shown)} runs are drawn.</p>' if more > 0 else ""
    choice = (
        '<p class="over"><button type=button data-over=steps aria-pressed=true>over steps</button>'
        "<button type=button data-over=tokens aria-pressed=false>over active tokens</button></p>"
    )
    content = f'{choice}<div class="legend">{legend}</div>{note}<div class="charts">'
    return _section("Curves", f"{content}{''.join(drawn)}</div>")

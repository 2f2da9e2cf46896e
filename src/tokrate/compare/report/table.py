"""The comparison in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokrate.compare.factors import Ratio
from tokrate.compare.report.cells import COLUMNS, UNKNOWN, Column, factor_rows, percent, rate
from tokrate.compare.result import Comparison, RunResult

WIDE = 100
"""Columns of a terminal that has room for everything."""
MOST_DOUBTS = 30


def print_comparison(found: Comparison, console: Console) -> None:
    """Print the table, why, and what to doubt."""
    console.print(_runs(found.runs, console.width))
    causes = factor_rows(found.runs)
    if causes:
        console.print(Text(f"\nWhy, against {found.reference}:", style="bold"))
        for (label, times, text), run in zip(causes, _with_factors(found.runs), strict=True):
            line = Text.assemble((label, "bold"), " ", times, " = ")
            console.print(line.append_text(_coloured(text, run.versus)))
    if found.sentences:
        console.print()
    for sentence in found.sentences:
        console.print(Text(sentence))
    if found.doubts:
        console.print(Text("\nDoubts:", style="bold yellow"))
    for doubt in found.doubts[:MOST_DOUBTS]:
        console.print(Text.assemble(("- ", "yellow"), doubt.text))
    if len(found.doubts) > MOST_DOUBTS:
        console.print(f"  and {len(found.doubts) - MOST_DOUBTS} more: --json shows all")


def print_runs(runs: Sequence[RunResult], console: Console) -> None:
    """Print the list of runs."""
    wide = console.width >= WIDE
    table = _table()
    table.add_column("run", overflow="fold")
    for title in ("outcome", "started"):
        table.add_column(title, no_wrap=True)
    numbers = ("windows", "active tok/s", "raw tok/s", "padded", "masked")[: 5 if wide else 4]
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        cells = (
            run.outcome or UNKNOWN,
            _day(run.started_unix_ms, "%Y-%m-%d %H:%M" if wide else "%m-%d %H:%M"),
            f"{run.windows:,}",
            rate(run.active_tps if run.active_tps is not None else run.active_tps_per_device),
            rate(run.raw_tps if run.raw_tps is not None else run.raw_tps_per_device),
            percent(run.padded_frac),
            percent(run.masked_frac),
        )
        table.add_row(Text(run.label), *cells[: 2 + len(numbers)])
    console.print(table)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)


def _runs(runs: Sequence[RunResult], width: int) -> Table:
    shown = [column for column in COLUMNS if width >= WIDE or column.always]
    table = _table()
    for column in shown:
        is_name = column.title == "run"
        table.add_column(
            column.title,
            justify="left" if is_name else "right",
            overflow="fold",
            no_wrap=not is_name,
        )
    for run in runs:
        table.add_row(*(_cell(column, run) for column in shown))
    return table


def _cell(column: Column, run: RunResult) -> Text:
    style = ""
    if column.title == "ratio" and run.versus is not None and run.versus.shows_difference:
        style = "green" if run.versus.ratio > 1 else "red"
    return Text(column.cell(run), style=style)


def _with_factors(runs: Sequence[RunResult]) -> list[RunResult]:
    return [run for run in runs if run.versus is not None and run.versus.factors]


def _coloured(text: str, versus: Ratio | None) -> Text:
    """The product, its largest factor in bold."""
    line = Text(text)
    if versus is not None:
        largest = max(versus.factors, key=lambda f: abs(f.ratio - 1))
        line.highlight_words([f"{largest.name} ×{largest.ratio:.3f}"], "bold")
    return line


def _day(unix_ms: int | None, form: str) -> str:
    return UNKNOWN if unix_ms is None else time.strftime(form, time.localtime(unix_ms / 1000))

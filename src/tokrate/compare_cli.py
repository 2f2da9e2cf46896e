"""The commands `tokrate compare` and `tokrate runs`.

Exit codes: 0 all is well · 1 a run is below `--fail-below` · 2 an error · 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from tokrate.compare.progress import Progress
    from tokrate.compare.result import Comparison

BELOW, INTERRUPTED = 1, 130
SHOW_AFTER_S = 1.0
"""What takes longer gets a bar."""
KINDS = ("tensorboard:", "mlflow:", "wandb:")


def _complete(
    _context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Kinds of sources, and paths behind them."""
    kind = next((kind for kind in KINDS if typed.startswith(kind)), "")
    path = typed.removeprefix(kind)
    parent = Path(path if path.endswith("/") or not path else Path(path).parent)
    begun = "" if path.endswith("/") else Path(path).name
    try:
        found = sorted(p for p in parent.iterdir() if p.is_dir() and p.name.startswith(begun))
    except OSError:
        found = []
    items = [CompletionItem(f"{kind}{p}") for p in found]
    return items + [CompletionItem(k) for k in KINDS if typed and not kind and k.startswith(typed)]


sources_argument = click.argument(
    "sources", nargs=-1, required=True, metavar="SOURCE...", shell_complete=_complete
)


@click.command()
@sources_argument
@click.option("--base", metavar="NAME", help="Run to compare with, instead of the first.")
@click.option("--json", "form", flag_value="json", help="Print everything as JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print one line for each run as CSV.")
@click.option("--markdown", "form", flag_value="markdown", help="Print tables for a report.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page to FILE."
)
@click.option(
    "--fail-below",
    type=click.FloatRange(min=0, min_open=True),
    metavar="RATIO",
    help="Exit with 1 when a run is slower than RATIO times the first, beyond noise.",
)
def compare(
    sources: tuple[str, ...],
    base: str | None,
    form: str | None,
    html: Path | None,
    fail_below: float | None,
) -> None:
    """Say which run is faster, and why.

    SOURCE is a run's folder or a folder of runs, tensorboard:DIR, mlflow:URI#experiment, or
    wandb:DIR (offline files) and wandb:ENTITY/PROJECT. All others are compared with the first run.
    """
    from tokrate.compare.comparison import compare_runs, read_runs
    from tokrate.compare.gate import check_gate
    from tokrate.compare.report.page import check_target, write_page

    with _interruptible():
        if html is not None:
            check_target(html)
        with _bar() as progress:
            runs = read_runs(sources, progress)
            found = compare_runs(runs, base, progress)
        slow = () if fail_below is None else check_gate(found, fail_below)
        if html is not None:
            write_page(found, runs, html)
    _show(found, form)
    for line in slow:
        click.echo(f"tokrate: {line}", err=True)
    if slow:
        sys.exit(BELOW)


@click.command()
@sources_argument
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def runs(sources: tuple[str, ...], as_json: bool) -> None:
    """List runs: how they ended, and how fast they were.

    SOURCE is as for compare.
    """
    from rich.console import Console

    from tokrate.compare.comparison import list_runs, read_runs
    from tokrate.compare.report.table import print_runs
    from tokrate.compare.report.text import runs_as_json

    with _interruptible(), _bar() as progress:
        found = list_runs(read_runs(sources, progress), progress)
    if as_json:
        click.echo(runs_as_json(found))
    else:
        print_runs(found, Console())


def _show(found: Comparison, form: str | None) -> None:
    from rich.console import Console

    from tokrate.compare.report.table import print_comparison
    from tokrate.compare.report.text import as_csv, as_json, as_markdown

    forms: dict[str, Callable[[Any], str]] = {
        "json": as_json,
        "csv": as_csv,
        "markdown": as_markdown,
    }
    if form is None:
        print_comparison(found, Console())
    else:
        click.echo(forms[form](found))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends with a code of its own; 1 would be taken for the gate's."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("tokrate: interrupted; nothing was written", err=True)
        sys.exit(INTERRUPTED)


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar on standard error, for what takes longer than a second."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    begun_s = time.monotonic()
    task = bars.add_task("", total=None)

    def show(what: str, done: int, total: int | None) -> None:
        if time.monotonic() - begun_s < SHOW_AFTER_S:
            return
        bars.start()
        text = f"{what} ({done:,})" if total is None else what
        bars.update(task, description=text, completed=done, total=total)

    try:
        yield show
    finally:
        if bars.live.is_started:  # stop() prints a line even where nothing was shown
            bars.stop()

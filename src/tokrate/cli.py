"""The command line: `tokrate demo`, `sync`, `compare` and `runs`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from tokrate.compare_cli import compare, runs
from tokrate.demo.arms import ARMS
from tokrate.errors import ConfigError, TokrateError


def _split(_context: click.Context, _option: click.Parameter, text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _logger_key(text: str | None) -> Any:
    """The `--logger` option of `sync`: names separated by commas, or JSON with options."""
    if text is None or not text.lstrip().startswith(("{", "[")):
        return text if text is None else [part.strip() for part in text.split(",")]
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--logger is no JSON ({error}): expected names, or a mapping") from None


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tokrate")
def cli() -> None:
    """How fast you really train: one honest tokens-per-second record for every tracker."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")


@cli.command()
@click.option(
    "--logger",
    callback=_split,
    default="tensorboard",
    show_default=True,
    help="Backends to write to, separated by commas, or none.",
)
@click.option(
    "--dir",
    "directory",
    default="demo-runs",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the runs.",
)
@click.option(
    "--arms",
    callback=_split,
    default=",".join(ARMS),
    show_default=True,
    help="Which ways of feeding the data to compare.",
)
@click.option(
    "--seconds", default=80.0, show_default=True, help="Seconds of training, all arms together."
)
def demo(logger: list[str], directory: Path, arms: list[str], seconds: float) -> None:
    """Fine-tune a small model on real text and see what explains tokens per second."""
    from rich.console import Console

    from tokrate.demo import run_demo

    run_demo(arms, logger, directory, seconds, Console())


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--logger", help="Backends instead of those of the run: names, or JSON.")
def sync(run: Path, logger: str | None) -> None:
    """Deliver what the run in folder RUN left waiting; running it twice does no harm."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from tokrate.delivery import DeliveryStats
    from tokrate.sync import sync_run

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(name: str, stats: DeliveryStats) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=stats.accepted)
            bars.update(tasks[name], completed=stats.accepted - stats.waiting)

        found = sync_run(run, _logger_key(logger), progress=show)
    waiting = False
    for name, stats in found.items():
        ending = f"; {stats.problem}" if stats.problem else ""
        all_there = "" if stats.waiting else "; nothing waits"
        click.echo(f"{name}: {stats}{all_there}{ending}")
        waiting = waiting or stats.waiting > 0 or stats.problem is not None
    if not found:
        click.echo("the run was logged to its journal alone; name a backend with --logger")
    if waiting:
        sys.exit(3)


cli.add_command(compare)
cli.add_command(runs)


def main() -> None:
    """Run the command line; an error of ours is one line and exit code 2, not a trace."""
    try:
        cli()
    except TokrateError as error:
        click.echo(f"tokrate: {error}", err=True)
        sys.exit(2)

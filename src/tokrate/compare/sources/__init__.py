"""Reads runs back from where they were written: a folder with journals, or a tracker.

runs/packed, runs          _journal       journal.jsonl in it, or below
tensorboard:DIR            _tensorboard   event files, a run for each folder
mlflow:URI#experiment      _mlflow        a database or a server
wandb:DIR, wandb:ENTITY/PROJECT   _wandb  offline files, or the public API
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokrate.compare.progress import Progress, silent
from tokrate.compare.series import Series
from tokrate.compare.sources._journal import read_journals
from tokrate.compare.sources._mlflow import read_mlflow
from tokrate.compare.sources._tensorboard import read_tensorboard
from tokrate.compare.sources._wandb import read_wandb
from tokrate.errors import CompareError

Reader = Callable[[str, Progress], list[Series]]
READERS: dict[str, Reader] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
}


def read_source(source: str, progress: Progress = silent) -> list[Series]:
    """All runs of a source, by the time of their first window.

    Args:
        source: A folder, `tensorboard:DIR`, `mlflow:URI#experiment`, or `wandb:` with a folder of
            offline files or `entity/project`.
        progress: Told how far reading is.

    Raises:
        CompareError: It is not there, cannot be read, or has no run with a speed in it.
    """
    kind, colon, rest = source.partition(":")
    try:
        if colon and kind in READERS:
            found = READERS[kind](rest, progress)
        elif colon and not Path(source).exists() and kind.isalpha():
            raise CompareError(
                f"{source!r}: {kind!r} is no kind of source: expected a folder, or one of "
                f"{', '.join(f'{name}:…' for name in READERS)}"
            )
        else:
            found = read_journals(Path(source), progress)
    except OSError as error:
        raise CompareError(
            f"{source}: {error.filename or 'it'} cannot be read ({error.strerror or error})"
        ) from error
    if not any(len(series) for series in found):
        raise CompareError(_why_empty(source, found))
    return sorted(found, key=lambda series: series.time_ms[0] if len(series) else 2**62)


def _why_empty(source: str, found: list[Series]) -> str:
    names = ", ".join(series.facts.name for series in found[:3])
    notes = "; ".join(dict.fromkeys(note for s in found for note in s.facts.notes))
    return (
        f"{source}: {len(found)} run{'s' * (len(found) != 1)} ({names}) without a single record"
        f"{f' ({notes})' if notes else ''}: expected runs that have logged at least two windows"
    )

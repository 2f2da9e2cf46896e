"""Compares runs: from sources to everything that the reports show."""

from __future__ import annotations

from collections.abc import Sequence

from tokrate.compare.doubts import Case, find_doubts
from tokrate.compare.factors import compare_steady
from tokrate.compare.progress import Progress, silent
from tokrate.compare.result import Comparison, RunResult, result_of
from tokrate.compare.same import Run, gather_runs
from tokrate.compare.sources import read_source
from tokrate.compare.steady import find_steady
from tokrate.compare.words import packing, sentence
from tokrate.errors import CompareError

MOST_SENTENCES = 20


def read_runs(sources: Sequence[str], progress: Progress = silent) -> list[Run]:
    """The runs of all sources; what several sources say of one run is put together.

    Args:
        sources: As for `tokrate.compare.sources.read_source`.
        progress: Told how far reading is.

    Raises:
        CompareError: A source is not there, cannot be read, or has no run in it.
    """
    return gather_runs(series for source in sources for series in read_source(source, progress))


def list_runs(runs: Sequence[Run], progress: Progress = silent) -> tuple[RunResult, ...]:
    """The runs in their steady state, each for itself."""
    found = []
    for number, run in enumerate(runs):
        progress("working out steady states", number, len(runs))
        found.append(result_of(run, find_steady(run.series, number), None))
    return tuple(found)


def compare_runs(
    runs: Sequence[Run], reference: str | None = None, progress: Progress = silent
) -> Comparison:
    """Compare runs with the first of them, or with the one that is named.

    Args:
        runs: As `read_runs` returns them.
        reference: Label of the run to compare with.
        progress: Told how far it is.

    Raises:
        CompareError: There is no run of that label, or none at all.
    """
    ordered = _reference_first(runs, reference)
    steady = []
    for number, run in enumerate(ordered):
        progress("working out steady states", number, len(ordered))
        steady.append(find_steady(run.series, number))
    versus = [
        None if base is None or found is None or number == 0 else compare_steady(found, base)
        for base in steady[:1]
        for number, found in enumerate(steady)
    ]
    results = [result_of(*each) for each in zip(ordered, steady, versus, strict=True)]
    cases = [Case(*each) for each in zip(ordered, steady, results, strict=True)]
    said = [sentence(result, results[0]) for result in results[1:]]
    said += [words for result in results if (words := packing(result)) is not None]
    return Comparison(
        reference=results[0].label,
        runs=tuple(results),
        sentences=tuple(said[:MOST_SENTENCES]),
        doubts=find_doubts(cases),
    )


def _reference_first(runs: Sequence[Run], reference: str | None) -> list[Run]:
    if not runs:
        raise CompareError("no runs to compare: expected at least one")
    if reference is None:
        return list(runs)
    chosen = [run for run in runs if run.label == reference]
    if not chosen:
        labels = ", ".join(run.label for run in runs[:20])
        raise CompareError(f"no run is called {reference!r}: expected one of {labels}")
    return [*chosen, *(run for run in runs if run.label != reference)]

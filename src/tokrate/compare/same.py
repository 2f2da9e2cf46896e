"""Puts together what several sources say of the same run, and gives every run a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tokrate.compare.series import Series

BEST_FIRST = ("journal", "mlflow", "wandb", "tensorboard")
"""Which source is used: exact numbers and sessions first, float32 last."""
AGREE = 1e-6
"""Relative difference of two float32 numbers that are the same but for rounding."""
COMPARED = ("active_tps", "raw_tps", "padded_frac", "masked_frac", "elapsed_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, with all that was read of it."""

    label: str
    """A name that no other run of the comparison has."""
    series: Series
    """What the best source says."""
    others: tuple[Series, ...]
    """What further sources say of it."""
    disagreements: tuple[str, ...]
    """Where they contradict the best one."""


def gather_runs(found: Iterable[Series]) -> list[Run]:
    """One run for each id and name, in the order in which they were found."""
    groups: dict[tuple[str, str | None], list[Series]] = {}
    for series in found:
        run_id = series.facts.run_id
        key = (series.facts.name, run_id if run_id is not None else series.facts.where)
        groups.setdefault(key, []).append(series)
    ordered = [
        sorted(group, key=lambda series: BEST_FIRST.index(series.facts.source))
        for group in groups.values()
    ]
    labels = _labels([group[0] for group in ordered])
    return [
        Run(
            label=label,
            series=best,
            others=tuple(others),
            disagreements=tuple(
                said for other in others if (said := disagreement(best, other)) is not None
            ),
        )
        for label, (best, *others) in zip(labels, ordered, strict=True)
    ]


def disagreement(best: Series, other: Series) -> str | None:
    """In one sentence, where two sources of a run contradict each other; None where they agree."""
    names = f"{_source(best)} and {_source(other)}"
    common, mine, theirs = np.intersect1d(best.step, other.step, return_indices=True)
    missing = len(best) - len(common), len(other) - len(common)
    if any(missing):
        waiting = "; `tokrate sync` delivers what waits" if missing[0] and not missing[1] else ""
        return (
            f"{names} do not hold the same windows: {missing[0]} of {len(best)} are only in the "
            f"first, {missing[1]} of {len(other)} only in the second{waiting}"
        )
    for column in COMPARED:
        a, b = best.columns[column][mine], other.columns[column][theirs]
        differ = ~np.isclose(a, b, rtol=AGREE, atol=0) & np.isfinite(a) & np.isfinite(b)
        if differ.any():
            at = int(np.flatnonzero(differ)[0])
            return (
                f"{names} differ in {column} of {int(differ.sum())} windows; at step {common[at]} "
                f"they say {a[at]:,.6g} and {b[at]:,.6g}"
            )
    return None


def _source(series: Series) -> str:
    return f"{series.facts.source} ({series.facts.where})"


def _labels(found: Sequence[Series]) -> list[str]:
    """The runs' names; of runs with one name, with id or place behind it."""
    names = Counter(series.facts.name for series in found)
    labels = []
    for series in found:
        facts = series.facts
        alone = names[facts.name] == 1
        labels.append(facts.name if alone else f"{facts.name} [{facts.run_id or facts.where}]")
    return labels

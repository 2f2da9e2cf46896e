"""From the ranks' reports to one window: sums of tokens, the slowest rank's time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokrate.counting import contradiction, target_on_padding


class Report(NamedTuple):
    """What one rank tells the others about its window."""

    raw: int
    active: int
    padded: int
    """Padded slots of the batches that said something about padding."""
    unknown: int
    """Slots of the batches that said nothing about padding, or contradicted themselves."""
    wrong: int
    """Active targets on padded slots, as far as they were looked for."""
    lost: int
    """Batches that could not be counted at all."""
    checksum: int
    """Of the rank's first batch; 0 when there was none or this is not the first window."""
    step: int
    elapsed_s: float
    paused_s: float
    data_wait_s: float
    """-1 when no loader was watched: None does not travel in a tensor."""


REPORT_INTEGERS = 8
"""The first fields of a report are whole numbers, the rest are seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One window over all ranks."""

    raw: int
    active: int
    padded: int | None
    elapsed_s: float
    paused_s: float
    data_wait_s: float | None
    rank_imbalance: float | None
    lost: int
    """Batches that could not be counted: no rate is honest then."""
    problem: str | None
    """Why the counts contradict each other, if they do."""

    def rate(self, tokens: int) -> float | None:
        """Tokens per second of the window; None when its time or its tokens are not known."""
        return tokens / self.elapsed_s if self.elapsed_s > 0 and not self.lost else None

    @property
    def padded_frac(self) -> float | None:
        """Padded slots as a share of raw."""
        return None if self.padded is None or not self.raw else self.padded / self.raw

    @property
    def masked_frac(self) -> float | None:
        """Masked tokens as a share of raw."""
        if self.padded is None or not self.raw:
            return None
        return (self.raw - self.active - self.padded) / self.raw


def combine(reports: Sequence[Report], replicas: int) -> Window:
    """Add up what the ranks counted; time is the slowest rank's.

    Args:
        reports: One per rank.
        replicas: How many ranks counted the same tokens.
    """
    raw, active, padded, unknown, wrong, lost = (
        sum(column) for column in zip(*(report[:6] for report in reports), strict=True)
    )
    problem = None
    if wrong:
        problem = target_on_padding(wrong, raw)
    elif active + padded > raw or padded < 0:
        problem = contradiction(raw, active, padded)
    wait_s = max(report.data_wait_s for report in reports)
    known = not (unknown or lost or problem)
    return Window(
        raw=raw // replicas,
        active=active // replicas,
        padded=padded // replicas if known else None,
        elapsed_s=max(report.elapsed_s for report in reports),
        paused_s=max(report.paused_s for report in reports),
        data_wait_s=None if wait_s < 0 else wait_s,
        rank_imbalance=max(r.raw for r in reports) * len(reports) / raw if raw else None,
        lost=lost,
        problem=problem,
    )


def same_batches(reports: Sequence[Report], replicas: int) -> list[list[int]]:
    """Groups of ranks whose first batch was the same although that was not declared.

    Args:
        reports: One per rank, in rank order.
        replicas: How many ranks may share a batch.
    """
    ranks: dict[int, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.checksum:
            ranks.setdefault(report.checksum, []).append(rank)
    return [same for same in ranks.values() if len(same) > replicas]

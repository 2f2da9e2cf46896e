"""From the ranks' reports to one window: sums of tokens, the slowest rank's time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

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


class Reports(NamedTuple):
    """The reports of all ranks by column, each in rank order.

    Columns, since at 16,384 ranks building and adding up rows takes five times as long
    (docs/explanation/scale.md). The fields are those of `Report`.
    """

    raw: Sequence[int]
    active: Sequence[int]
    padded: Sequence[int]
    unknown: Sequence[int]
    wrong: Sequence[int]
    lost: Sequence[int]
    checksum: Sequence[int]
    step: Sequence[int]
    elapsed_s: Sequence[float]
    paused_s: Sequence[float]
    data_wait_s: Sequence[float]

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Self:
        """The columns of some rows."""
        return cls(*zip(*reports, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One window over all ranks."""

    raw: int
    active: int
    padded: int | None
    elapsed_s: float
    """The slowest rank's; that of the rank whose clock ran backwards, if one did."""
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


def combine(reports: Reports | Iterable[Report], replicas: int) -> Window:
    """Add up what the ranks counted; time is the slowest rank's.

    Args:
        reports: One per rank.
        replicas: How many ranks counted the same tokens.
    """
    columns = reports if isinstance(reports, Reports) else Reports.of(reports)
    raw, active, padded, unknown, wrong, lost = (sum(column) for column in columns[:6])
    problem = None
    if wrong:
        problem = target_on_padding(wrong, raw)
    elif active + padded > raw or padded < 0:
        problem = contradiction(raw, active, padded)
    first_s, last_s = min(columns.elapsed_s), max(columns.elapsed_s)
    wait_s = max(columns.data_wait_s)
    known = not (unknown or lost or problem)
    return Window(
        raw=raw // replicas,
        active=active // replicas,
        padded=padded // replicas if known else None,
        elapsed_s=first_s if first_s < 0 else last_s,
        paused_s=max(columns.paused_s),
        data_wait_s=None if wait_s < 0 else wait_s,
        rank_imbalance=max(columns.raw) * len(columns.raw) / raw if raw else None,
        lost=lost,
        problem=problem,
    )


# --- what only shows when all ranks are looked at ------------------------------------------------


def same_batches(checksums: Sequence[int], replicas: int) -> list[list[int]]:
    """Groups of ranks whose first batch was the same although that was not declared.

    Args:
        checksums: One per rank, in rank order; 0 where there is none.
        replicas: How many ranks may share a batch.
    """
    return [same for same in _by_batch(checksums) if len(same) > replicas]


def lone_batches(checksums: Sequence[int], replicas: int) -> list[list[int]]:
    """Groups of fewer ranks than were declared to share a batch; none while one rank is silent."""
    if replicas == 1 or not all(checksums):
        return []
    return [same for same in _by_batch(checksums) if len(same) < replicas]


def _by_batch(checksums: Sequence[int]) -> list[list[int]]:
    ranks: dict[int, list[int]] = {}
    for rank, checksum in enumerate(checksums):
        if checksum:
            ranks.setdefault(checksum, []).append(rank)
    return list(ranks.values())

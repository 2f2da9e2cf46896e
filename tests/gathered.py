"""Many ranks in one process: real meters, whose reports are gathered by hand, not by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from driving import Clock
from tokrate import RankLayout, ThroughputMeter, ThroughputRecord, TokenCounts
from tokrate.window import Report, Reports


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRanks(RankLayout):
    """A layout of `count` ranks that share one list of reports; the last one sees them all."""

    count: int = 1
    reports: list[Report] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.count

    @property
    def device_count(self) -> int:
        """What per-device rates divide by."""
        return self.devices or self.count

    def check(self) -> None:
        """Nothing to check: there is no process group."""

    def gather(self, report: Report) -> Reports:
        """The reports of the ranks so far, this one last."""
        self.reports.append(report)
        return Reports.of(list(self.reports))


def record_of_ranks(
    ranks: Sequence[Mapping[str, Any]],
    *,
    replicas: int = 1,
    devices: int | None = None,
    **options: Any,
) -> ThroughputRecord:
    """The record of one window in which each rank counted its batches in its time.

    Args:
        ranks: Of each rank `raw`, `active`, `padded` and `elapsed_s`.
        replicas: How many ranks counted the same tokens.
        devices: What per-device rates divide by.
        options: Further options of the meter.
    """
    layout = GatheredRanks(count=len(ranks), replicas=replicas, devices=devices)
    record = None
    for rank in ranks:
        clock = Clock()
        meter = ThroughputMeter(clock=clock, ranks=layout, **options)
        meter.add(TokenCounts(rank["raw"], rank["active"], rank["padded"]))
        clock.now = rank["elapsed_s"]
        record = meter.record(1)
    assert record is not None
    return record

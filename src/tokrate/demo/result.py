"""What a demo run found: sums over the steady windows of each arm, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokrate.record import ThroughputRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One arm in its steady state. Rates are sums of tokens over sums of seconds.

    `active_tps == raw_tps * (1 - padded_frac - masked_frac)`, up to float rounding.
    """

    name: str
    """Name of the arm and of its run."""
    folder: Path
    """Folder of the run: journal, event files, offline files."""
    windows: int
    """Records that are summed up here; those of the warm-up are left out."""
    disturbed: int
    """How many of them had less than half the `raw_tps` of the best: something else used the
    machine. They are summed up all the same."""
    steps: int
    """Optimizer steps in these windows."""
    elapsed_s: float
    """Seconds of training in these windows."""
    raw_tokens: int
    """Slots in these windows."""
    active_tokens: int
    """Active tokens in these windows."""
    padded_tokens: int
    """Padded slots in these windows."""
    pairs: int
    """Question/answer pairs in an epoch."""
    steps_per_epoch: int
    """Optimizer steps that one pass through the pairs takes."""
    trained_steps: int
    """Optimizer steps of the whole run, warm-up included."""
    loss: float
    """Cross-entropy on the answers of the held-out pairs at the end, in nats per token."""

    @property
    def raw_tps(self) -> float:
        """Slots per second."""
        return self.raw_tokens / self.elapsed_s

    @property
    def active_tps(self) -> float:
        """Active tokens per second."""
        return self.active_tokens / self.elapsed_s

    @property
    def padded_frac(self) -> float:
        """Padded slots as a share of raw."""
        return self.padded_tokens / self.raw_tokens

    @property
    def masked_frac(self) -> float:
        """Real tokens that are context only, as a share of raw."""
        return (self.raw_tokens - self.padded_tokens - self.active_tokens) / self.raw_tokens

    @property
    def seconds_per_epoch(self) -> float:
        """Seconds that one pass through the pairs takes at the measured pace."""
        return self.steps_per_epoch * self.elapsed_s / self.steps

    @property
    def pairs_per_s(self) -> float:
        """Progress through the data: question/answer pairs per second."""
        return self.pairs / self.seconds_per_epoch


@dataclass(frozen=True, slots=True)
class Factors:
    """Why one arm's `active_tps` differs from another's: a product of three ratios."""

    active: float
    """Ratio of `active_tps`; `raw * unpadded * unmasked`, up to float rounding."""
    raw: float
    """Ratio of `raw_tps`: the hardware."""
    unpadded: float
    """Ratio of the shares that are not padding."""
    unmasked: float
    """Ratio of the shares of real tokens that are active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim of torchtune issue 2296, and what was measured of it."""

    letter: str
    text: str
    """The claim."""
    measured: str
    """The numbers."""
    holds: bool
    """Whether the numbers bear the claim out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything that the demo printed, as numbers."""

    arms: tuple[ArmResult, ...]
    """In the order in which they were trained."""
    claims: tuple[Claim, ...]
    """Those that the chosen arms can tell about."""


def sum_steady(
    records: Sequence[ThroughputRecord],
    *,
    name: str,
    folder: Path,
    pairs: int,
    steps_per_epoch: int,
    loss: float,
) -> ArmResult:
    """An arm's result from its records. Σ tokens ÷ Σ seconds: a mean of rates would be wrong."""
    steady = [record for record in records if not record.warmup]
    return ArmResult(
        name=name,
        folder=folder,
        windows=len(steady),
        disturbed=_count_disturbed(steady),
        steps=sum(record.steps for record in steady),
        elapsed_s=sum(record.elapsed_s for record in steady),
        raw_tokens=sum(record.raw_tokens for record in steady),
        active_tokens=sum(record.active_tokens for record in steady),
        padded_tokens=sum(record.padded_tokens or 0 for record in steady),
        pairs=pairs,
        steps_per_epoch=steps_per_epoch,
        trained_steps=records[-1].step,
        loss=loss,
    )


def _count_disturbed(steady: Sequence[ThroughputRecord]) -> int:
    rates = [record.raw_tps or 0.0 for record in steady]
    return sum(rate < max(rates) / 2 for rate in rates)


def explain(base: ArmResult, other: ArmResult) -> Factors:
    """The ratio of two arms' `active_tps` as the product of its three causes."""
    unpadded, base_unpadded = 1 - other.padded_frac, 1 - base.padded_frac
    return Factors(
        active=other.active_tps / base.active_tps,
        raw=other.raw_tps / base.raw_tps,
        unpadded=unpadded / base_unpadded,
        unmasked=(1 - other.masked_frac / unpadded) / (1 - base.masked_frac / base_unpadded),
    )

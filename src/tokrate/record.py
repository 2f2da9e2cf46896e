"""The record: one immutable measurement of a window, the same for every framework and tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Protocol, Self

SCHEMA_VERSION = 1


class Naming(Protocol):
    """Says which numbers of a record are sent, and under which keys (see `tokrate.names`)."""

    @property
    def columns(self) -> Sequence[tuple[str, str]]:
        """Pairs of metric key and record attribute, in the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRecord:
    """How fast a window of training was, and what explains it. Unknown is `None`.

    Every record satisfies, up to float rounding,
    `active_tps == raw_tps * (1 - padded_frac - masked_frac)`.
    """

    step: int
    """Optimizer step that closed the window."""
    active_tps: float | None
    """Active tokens per second, over all ranks: how fast the tokens that train the model go by."""
    raw_tps: float | None
    """Slots per second, over all ranks: how fast the hardware works."""
    padded_frac: float | None
    """Padded slots as a share of raw, 0 to 1; None when nothing told padding apart."""
    masked_frac: float | None
    """Real tokens that are context only, as a share of raw, 0 to 1; None as `padded_frac`."""
    active_tps_per_device: float | None
    """`active_tps` divided by `devices`, in tokens per second and device."""
    raw_tps_per_device: float | None
    """`raw_tps` divided by `devices`, in tokens per second and device."""
    raw_tokens: int
    """Slots in the window, over all ranks."""
    active_tokens: int
    """Active tokens in the window, over all ranks."""
    padded_tokens: int | None
    """Padded slots in the window, over all ranks; None when nothing told padding apart."""
    steps: int
    """Optimizer steps in the window: `step` minus the step of the record before."""
    elapsed_s: float
    """Seconds of training in the window (the slowest rank's), phases left out."""
    paused_s: float
    """Seconds that phases took (evaluation, checkpoints) since the record before."""
    data_wait_s: float | None
    """Seconds of `elapsed_s` spent waiting for data; None when no loader was watched."""
    devices: int
    """Number of devices that the per-device rates divide by."""
    rank_imbalance: float | None
    """Busiest rank's slots divided by the mean over ranks, at least 1; None for an empty window."""
    total_raw_tokens: int
    """Slots of the run so far, restarts included."""
    total_active_tokens: int
    """Active tokens of the run so far, restarts included."""
    total_elapsed_s: float
    """Seconds of training of the run so far, restarts included."""
    session: int
    """How many times the run was started: 1 at first, 2 after one restart."""
    mfu: float | None
    """Model FLOP utilisation, 0 to 1, over tokens that are not padding; None unless both
    `flops_per_token` and `peak_flops` were given (PaLM, arXiv:2204.02311, appendix B)."""
    warmup: bool
    """True for the first windows, which are logged and left out of every summary."""
    time_unix_ms: int
    """Wall-clock time when the window closed, in milliseconds since 1970-01-01 UTC."""
    schema_version: int = SCHEMA_VERSION
    """Version of this set of fields."""

    @property
    def masked_tokens(self) -> int | None:
        """Real tokens in the window that no target covers; None when padding is unknown."""
        if self.padded_tokens is None:
            return None
        return self.raw_tokens - self.active_tokens - self.padded_tokens

    @property
    def data_wait_frac(self) -> float | None:
        """`data_wait_s` as a share of `elapsed_s`, 0 to 1; None when either is unknown or 0 s."""
        if self.data_wait_s is None or self.elapsed_s <= 0:
            return None
        return self.data_wait_s / self.elapsed_s

    @property
    def is_finite(self) -> bool:
        """Whether no number of the record is NaN or infinite."""
        known = (
            (self.active_tps or 0.0) + (self.raw_tps or 0.0),
            (self.active_tps_per_device or 0.0) + (self.raw_tps_per_device or 0.0),
            (self.padded_frac or 0.0) + (self.masked_frac or 0.0) + (self.mfu or 0.0),
            (self.data_wait_s or 0.0) + (self.rank_imbalance or 0.0),
            self.elapsed_s + self.paused_s + self.total_elapsed_s,
        )
        return isfinite(sum(known))

    def metrics(self, names: Naming) -> dict[str, int | float]:
        """The flat mapping that backends write: one entry per known number, unknown ones left out.

        Args:
            names: A `tokrate.names.MetricNames`, which says what is sent and under which keys.
        """
        found = {}
        for key, attribute in names.columns:
            value = getattr(self, attribute)
            if value is not None:
                found[key] = int(value) if type(value) is bool else value
        return found

    def to_dict(self) -> dict[str, int | float | bool | None]:
        """Every field by its name: what the journal keeps."""
        return {name: getattr(self, name) for name in FIELD_NAMES}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The record that `to_dict` was called on; fields of a newer schema are ignored."""
        return cls(**{name: data[name] for name in FIELD_NAMES if name in data})


FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in fields(ThroughputRecord))

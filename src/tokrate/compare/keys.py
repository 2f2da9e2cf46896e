"""Which metric key is which number: tokrate's own names, and those of other frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tokrate.compare.series import COLUMNS, TOTAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The names under which a framework writes what we compare."""

    name: str
    keys: Mapping[str, tuple[str, float]]
    """Key, as it is written or legal everywhere → column, and what to multiply by."""
    notes: str
    """What the numbers do not tell."""


PER_STEP = "seconds_per_step"
"""Pseudo column: seconds of one step, from which the window's time follows."""
SEEN = "total_raw_tokens"
"""Pseudo column: slots so far, from whose growth the raw rate follows."""

NO_PADDING = "padding and masking are unknown"

DIALECTS = (
    # torchtune, recipes/full_finetune_distributed.py: labels that are not ignore_index, of the
    # last step, by its time and the number of ranks.
    Dialect(
        name="torchtune",
        keys={"tokens_per_second_per_gpu": ("active_tps_per_device", 1.0)},
        notes="torchtune writes active tokens per second and device; raw speed, padding, masking "
        "and the number of devices are unknown",
    ),
    # torchtitan, torchtitan/components/metrics.py, MetricsProcessor.log: every slot of the
    # labels, per device; percent. `_tps` and so on is the form that names.ALIASES writes.
    Dialect(
        name="torchtitan",
        keys={
            "throughput(tps)": ("raw_tps_per_device", 1.0),
            "throughput_tps": ("raw_tps_per_device", 1.0),
            "mfu(%)": ("mfu", 0.01),
            "time_metrics/end_to_end(s)": (PER_STEP, 1.0),
            "time_metrics/data_loading(%)": ("data_wait_frac", 0.01),
        },
        notes=f"torchtitan writes slots per second and device; {NO_PADDING}",
    ),
    # composer, composer/callbacks/speed_monitor.py: tokens as the data spec counts them (every
    # slot by default), a rolling mean over the last batches.
    Dialect(
        name="composer",
        keys={
            "throughput/tokens_per_sec": ("raw_tps", 1.0),
            "throughput/device/tokens_per_sec": ("raw_tps_per_device", 1.0),
            "throughput/device_tokens_per_sec": ("raw_tps_per_device", 1.0),
            "throughput/device/mfu": ("mfu", 1.0),
        },
        notes=f"composer writes slots per second as a rolling mean over many batches; {NO_PADDING}",
    ),
    # transformers, trainer.py (log) and trainer_utils.py (speed_metrics); its TensorBoard and W&B
    # callbacks put `train/` before the names.
    Dialect(
        name="huggingface",
        keys={
            "num_input_tokens_seen": (SEEN, 1.0),
            "train_tokens_per_second": ("raw_tps", 1.0),
        },
        notes=f"the Trainer of transformers counts slots; {NO_PADDING}",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a run's metrics are to be read."""

    written_by: str
    """`tokrate`, or the framework."""
    keys: Mapping[str, tuple[str, float]]
    """Metric key → column, and what to multiply by."""
    notes: tuple[str, ...] = field(default=())


def understand(keys: Iterable[str]) -> Reading | None:
    """How to read a run that has these metrics; None when it has no speed that we know.

    tokrate's own names are known behind any prefix, those of frameworks behind any folder.

    >>> understand(["loss", "throughput/active_tps"]).written_by
    'tokrate'
    >>> understand(["train/num_input_tokens_seen"]).keys
    {'train/num_input_tokens_seen': ('total_raw_tokens', 1.0)}
    """
    there = sorted(keys)
    return _own(there) or next(filter(None, (_foreign(d, there) for d in DIALECTS)), None)


def _own(keys: list[str]) -> Reading | None:
    prefixes = [k.removesuffix("/active_tps") for k in keys if k.endswith("/active_tps")]
    if not prefixes:
        return None
    prefix = "throughput" if "throughput" in prefixes else prefixes[0]
    wanted = {f"{prefix}/{column}": (column, 1.0) for column in (*COLUMNS, TOTAL)}
    return Reading(written_by="tokrate", keys={k: wanted[k] for k in keys if k in wanted})


def _foreign(dialect: Dialect, keys: list[str]) -> Reading | None:
    found: dict[str, tuple[str, float]] = {}
    for name, meaning in dialect.keys.items():
        same = [key for key in keys if key == name or key.endswith(f"/{name}")]
        same = [key for key in same if not key.startswith(("validation_metrics/", "eval/"))]
        if same and meaning not in found.values():
            found[min(same, key=len)] = meaning
    if SEEN in {column for column, _ in found.values()}:
        # Its growth is a rate of each window; the other is a mean over the run so far.
        found = {key: meaning for key, meaning in found.items() if meaning[0] != "raw_tps"}
    speeds = {column for column, _ in found.values()} & {*COLUMNS[:4], SEEN}
    return Reading(written_by=dialect.name, keys=found, notes=(dialect.notes,)) if speeds else None

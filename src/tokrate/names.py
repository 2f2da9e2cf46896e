"""Names of metrics: one alphabet that every tracker takes, and one gate that all names pass.

record field ──► MetricNames ──► `throughput/active_tps`
steady value ──► MetricNames ──► `throughput/steady_active_tps` (once, at `close`)
`eval/acc@5` ──► NameGate.admit ──► `eval/acc_5` (said once)
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tokrate.errors import ConfigError, MetricNameError
from tokrate.record import FIELD_NAMES
from tokrate.steady import STEADY

LEGAL_NAME = re.compile(r"[a-z0-9][a-z0-9_]*(/[a-z0-9][a-z0-9_]*)?")
MAX_LENGTH = 200
"""MLflow refuses names of more than 250 characters; the rest is room for a user's own prefix."""

STANDARD = (
    "active_tps",
    "raw_tps",
    "padded_frac",
    "masked_frac",
    "active_tps_per_device",
    "raw_tps_per_device",
    "elapsed_s",
    "total_active_tokens",
    "data_wait_frac",
    "rank_imbalance",
    "mfu",
)
ALL = (*FIELD_NAMES, "data_wait_frac")

ALIASES: Mapping[str, Mapping[str, str]] = {
    # torchtune, recipes: `tokens_per_second_per_gpu` counts unmasked tokens only.
    "torchtune": {"tokens_per_second_per_gpu": "active_tps_per_device"},
    # torchtitan, components/metrics.py: `throughput(tps)` and `mfu(%)`; the brackets, which MLflow
    # rejects, become underscores, and mfu stays a ratio under its own name.
    "torchtitan": {"throughput_tps": "raw_tps_per_device"},
    # composer, callbacks/speed_monitor.py; `device/` is a second slash level there.
    "composer": {
        "throughput/tokens_per_sec": "raw_tps",
        "throughput/device_tokens_per_sec": "raw_tps_per_device",
    },
    # transformers, Trainer: `num_input_tokens_seen` counts every slot by default.
    "huggingface": {
        "train_tokens_per_second": "raw_tps",
        "num_input_tokens_seen": "total_raw_tokens",
    },
}
"""Alias table: framework → name as it is written → attribute of the record it repeats."""


def legal_name(name: str) -> str:
    """The nearest legal form of a name: what a running loop writes and an error suggests.

    >>> legal_name("eval/acc@5"), legal_name("Train/Loss (mean)"), legal_name("a/b/c")
    ('eval/acc_5', 'train/loss_mean', 'a/b_c')
    """
    plain = unicodedata.normalize("NFKD", name.casefold())  # ö becomes o and a mark, ß becomes ss
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    parts = [re.sub(r"[^a-z0-9]+", "_", part).strip("_") for part in plain.split("/")]
    head, *tail = [part for part in parts if part] or ["unnamed"]
    return "/".join([head, "_".join(tail)] if tail else [head])[:MAX_LENGTH].rstrip("_/")


def check_name(name: str) -> str:
    """Return the name if every tracker takes it.

    Raises:
        MetricNameError: It is not lower-case letters, digits and `_` with at most one `/`.
    """
    if not isinstance(name, str):
        raise MetricNameError(
            f"a metric name must be a string, found {name!r} ({type(name).__name__})"
        )
    if not LEGAL_NAME.fullmatch(name) or len(name) > MAX_LENGTH:
        raise MetricNameError(
            f"metric name {name[:80]!r} is not legal in every tracker: expected a-z, 0-9 and _ "
            f"with at most one / and {MAX_LENGTH} characters; use {legal_name(name)!r}"
        )
    return name


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Which numbers of a record are sent, and under which keys."""

    prefix: str = "throughput"
    """What stands before the slash."""
    metrics: str = "standard"
    """`standard` or `all`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further key → attribute of the record that it repeats."""
    columns: Sequence[tuple[str, str]] = field(init=False, repr=False)
    """Pairs of metric key and record attribute, in the order in which they are shown."""

    def __post_init__(self) -> None:
        attributes = {"standard": STANDARD, "all": ALL}.get(self.metrics)
        if attributes is None:
            raise ConfigError(
                f"metrics={self.metrics!r} is unknown: expected 'standard' (what the pages show) "
                "or 'all' (every number of the record)"
            )
        if "/" in self.prefix:
            raise MetricNameError(
                f"prefix {self.prefix!r} must not hold a slash: keys are prefix/name and trackers "
                f"group on the first slash; use {legal_name(self.prefix).replace('/', '_')!r}"
            )
        check_name(self.prefix)
        columns = [(f"{self.prefix}/{attribute}", attribute) for attribute in attributes]
        columns += list(self.aliases.items())
        gate = NameGate()
        gate.declare([*self.reserved, *self.aliases])
        object.__setattr__(self, "columns", tuple(columns))

    @property
    def reserved(self) -> list[str]:
        """Keys that belong to us, whether they are sent or not."""
        return [f"{self.prefix}/{name}" for name in (*ALL, *STEADY)]

    def steady(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values that a run has as a whole, by their keys."""
        return {f"{self.prefix}/{name}": value for name, value in values.items()}


def parse_aliases(aliases: str | Iterable[str] | Mapping[str, str] | None) -> dict[str, str]:
    """Turn the `aliases` option into alias → attribute of the record.

    Args:
        aliases: A framework (`"torchtune"`), several, or an own mapping of alias to field name.

    Raises:
        ConfigError: An unknown framework or field.
        MetricNameError: An alias that some tracker would reject.
    """
    if aliases is None:
        return {}
    if isinstance(aliases, Mapping):
        for alias, attribute in aliases.items():
            check_name(alias)
            if attribute not in ALL:
                raise ConfigError(
                    f"alias {alias!r} repeats {attribute!r}, which is no field of the record; "
                    f"expected one of {', '.join(ALL)}"
                )
        return dict(aliases)
    names = [aliases] if isinstance(aliases, str) else list(aliases)
    found: dict[str, str] = {}
    for name in names:
        if name not in ALIASES:
            raise ConfigError(
                f"aliases={name!r} is unknown: expected {', '.join(ALIASES)}, "
                "or a mapping of your own names to fields of the record"
            )
        found.update(ALIASES[name])
    return found


class NameGate:
    """Lets through names that every tracker takes and that do not collide.

    Two names collide when they are equal, or when one is a path prefix of the other (`loss` and
    `loss/train`: MLflow's file store and TensorBoard's tree need one to be a folder).
    """

    def __init__(self) -> None:
        self._owner: dict[str, str | None] = {}  # legal name → name from outside; None: declared
        self._groups: set[str] = set()

    def declare(self, names: Iterable[str]) -> None:
        """Take the names as given, before training starts.

        Raises:
            MetricNameError: A name is illegal or collides with one that was declared before.
        """
        for name in names:
            check_name(name)
            if clash := self._clash(name):
                raise MetricNameError(
                    f"metric name {name!r} collides with {clash!r}: "
                    "names must differ and none may be a path prefix of another; rename one"
                )
            self._take(name, None)

    def admit(self, name: str) -> str | None:
        """The legal form under which a name from outside is written; None where it would collide.

        Args:
            name: Any name. The same name always gets the same answer.
        """
        fits = len(name) <= MAX_LENGTH and LEGAL_NAME.fullmatch(name)
        legal = name if fits else legal_name(name)
        if self._owner.get(legal) == name:
            return legal
        if self._clash(legal):
            return None
        self._take(legal, name)
        return legal

    def _clash(self, name: str) -> str | None:
        if name in self._owner:
            return name
        if name in self._groups:
            return f"{name}/…"
        head, slash, _ = name.partition("/")
        return head if slash and head in self._owner else None

    def _take(self, name: str, owner: str | None) -> None:
        self._owner[name] = owner
        head, slash, _ = name.partition("/")
        if slash:
            self._groups.add(head)

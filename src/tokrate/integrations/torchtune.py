"""torchtune: components for a recipe's configuration, so that no recipe is edited.

    collate_fn, dataset ──► counts ──► meter of the MetricLogger ──► record ──► journal
    checkpointer        ──► a phase, and totals in the recipe's state

Each component takes the place of torchtune's own of the same name. They find each other: a process
runs one recipe, and its `MetricLogger` is made before all others.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from tokrate.config import parse_logger
from tokrate.counting import TokenCounts, count_tokens
from tokrate.errors import ConfigError, CountingError
from tokrate.integrations import check_version
from tokrate.logger import Logger
from tokrate.meter import ThroughputMeter
from tokrate.opening import find_factories, open_logger
from tokrate.ranks import RankLayout
from tokrate.run import RunInfo

check_version("torchtune")

from torchtune import data, training  # noqa: E402
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX  # noqa: E402
from torchtune.datasets import PackedDataset  # noqa: E402

log = logging.getLogger("tokrate")

THEIR_RATE = "tokens_per_second_per_gpu"
STATE_KEY = "tokrate"
"""Key of the meter's totals in torchtune's `recipe_state.pt`."""

NOT_COUNTED = (
    "the recipe trains and nothing is counted: expected, in its configuration, collate_fn: "
    "tokrate.integrations.torchtune.padded_collate_sft, or for packed data dataset: _component_: "
    "tokrate.integrations.torchtune.counted_dataset with the data set as component:"
)

_said: set[str] = set()
_current: MetricLogger | None = None


class MetricLogger:
    """Writes what the recipe logs, and a record each time, to the journal and all trackers.

    A record goes with each `log_dict`, so every `log_every_n_steps`. The recipe's own rate keeps
    its name as an alias of ours, and stands beside it as `torchtune/tokens_per_second_per_gpu`.

    Args:
        logger: The `logger` key, as for `open_logger`.
        name: Name of the run.
        id: Identity across restarts; needed to go on with the same run.
        tags: Short words to find the run by.
        dir: Folder in which the run's folder is made.
        aliases: As for `open_logger`.
        meter: Arguments of `ThroughputMeter`, such as `flops_per_token`.
        options: All others of `open_logger`.

    Raises:
        ConfigError: The key, an option, a name or a package is wrong.
    """

    def __init__(
        self,
        logger: Any = "none",
        *,
        name: str = "torchtune",
        id: str | None = None,  # noqa: A002 - as RunInfo has it
        tags: Sequence[str] = (),
        dir: str | os.PathLike[str] = "runs",  # noqa: A002 - as open_logger has it
        aliases: str | Iterable[str] | Mapping[str, str] | None = "torchtune",
        meter: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        global _current
        find_factories(parse_logger(logger))
        self.meter = ThroughputMeter(**{"strict": False, **(meter or {})})
        """What the other components count into."""
        self._setup = ExitStack()
        self._setup.enter_context(self.meter.phase("set-up"))
        self._spec = logger
        self._run = RunInfo(name, id=id, tags=tuple(tags))
        self._options = {"dir": dir, "aliases": aliases, **options}
        self._logger: Logger | None = None
        self._counts = False
        _current = self

    # --- torchtune's protocol --------------------------------------------------------------------

    def log_config(self, config: Any) -> None:
        """Begin the run with this configuration.

        Where the recipe goes on from a checkpoint of `tokrate`'s checkpointer, the run begins when
        that has said at which step.
        """
        from omegaconf import OmegaConf

        plain: Any = OmegaConf.to_container(config, resolve=True)
        self._run = replace(self._run, config=plain)
        ours = str(config.get("checkpointer", {}).get("_component_", "")).startswith(f"{__name__}.")
        if not (ours and config.get("resume_from_checkpoint")):
            self.open()

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Log what the recipe measured, and a record."""
        logger = self.open()
        if self.meter.ranks.size == 1:
            if not self._counts:
                self._setup.close()
                self.meter.lose(NOT_COUNTED)
            logger.log(self.meter.record(step))
        else:  # a record takes all ranks, and torchtune calls the first one only
            _say(
                "torchtune calls its logger on rank 0 alone, so that the tokens of all ranks "
                "cannot be added up: only the recipe's own numbers are logged, among them "
                f"{THEIR_RATE}; records come with single-device recipes"
            )
        theirs = {name: value for name, value in payload.items() if name != THEIR_RATE}
        if THEIR_RATE in payload:
            theirs[f"torchtune/{THEIR_RATE}"] = payload[THEIR_RATE]
        logger.log_metrics(theirs, step=step)

    def log(self, name: str, data: Any, step: int) -> None:
        """Log one number."""
        self.open().log_metrics({name: data}, step=step)

    def close(self) -> None:
        """End the run as finished: torchtune calls this only where the recipe came to its end."""
        self.open().close()

    # --- what the other components call ----------------------------------------------------------

    def count(self, counting: Callable[[], TokenCounts]) -> None:
        """Count a batch. The first one ends the set-up. Training goes on, whatever a batch is."""
        self._setup.close()
        self._counts = True
        try:
            self.meter.add(counting())
        except CountingError as error:
            self.meter.lose(str(error))

    def open(self, resume_step: int | None = None) -> Logger:
        """The logger of the run, opened if it is not yet.

        Raises:
            TokrateError: As `open_logger`.
        """
        if self._logger is None:
            run = replace(self._run, resume_step=resume_step)
            self._logger = open_logger(self._spec, run=run, ranks=RankLayout(), **self._options)
        return self._logger


# --- counting ------------------------------------------------------------------------------------


def padded_collate_sft(
    batch: list[dict[str, list[int]]],
    padding_idx: int = 0,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
) -> Any:
    """`torchtune.data.padded_collate_sft`, counted. For `collate_fn:` in a configuration."""
    collated = data.padded_collate_sft(batch, padding_idx=padding_idx, ignore_idx=ignore_idx)
    labels = collated["labels"]
    real = [max(len(sample["tokens"]), len(sample["labels"])) for sample in batch]
    _count(lambda: _counts(labels, sum(real), ignore_idx))
    return collated


def counted_dataset(tokenizer: Any, *, component: str, **options: Any) -> Any:
    """A data set whose packs are counted as they are handed out. For `dataset:` in a configuration.

    Packed data has a collate function of the recipe's own, which no configuration reaches. Data
    that is not packed is left as it is, for `padded_collate_sft` to count.

    Args:
        tokenizer: The recipe's.
        component: What stood as `_component_` before, such as `torchtune.datasets.alpaca_dataset`.
        options: Its arguments.

    Raises:
        ConfigError: There is no such component.
    """
    try:
        make = pkgutil.resolve_name(component)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"dataset: component: {component!r} cannot be found ({error}): expected the path of a "
            "torchtune data set, such as torchtune.datasets.alpaca_dataset"
        ) from error
    dataset = make(tokenizer, **options)
    return CountedPacks(dataset) if isinstance(dataset, PackedDataset) else dataset


class CountedPacks(PackedDataset):  # type: ignore[misc]
    """Packs that are counted as they are handed out; the recipe trains on each that it takes."""

    def __init__(self, packed: PackedDataset) -> None:
        self.__dict__.update(packed.__dict__)

    def __getitem__(self, idx: int) -> Any:
        pack = super().__getitem__(idx)
        _count(lambda: _counts(pack["labels"], self._real(pack), CROSS_ENTROPY_IGNORE_IDX))
        return pack

    def _real(self, pack: Mapping[str, Any]) -> int:
        """Slots before the padding, which torchtune makes the last document of the pack."""
        length = int(pack["seq_lens"][-1])
        tail = pack["tokens"][-length:]
        return len(pack["tokens"]) - (length if (tail == self.padding_idx).all() else 0)


def _counts(labels: Any, real: int, ignore_index: int) -> TokenCounts:
    """Counts of labels that the recipe's loss will shift, of which so many slots hold a token."""
    counts = count_tokens(labels, ignore_index=ignore_index)
    return TokenCounts(counts.raw, counts.active, counts.raw - real)


def _count(counting: Callable[[], TokenCounts]) -> None:
    """Count into the meter of the recipe's logger."""
    if _current is not None:
        _current.count(counting)
    else:
        _say(
            "nothing is counted: expected metric_logger: _component_: "
            "tokrate.integrations.torchtune.MetricLogger in the configuration"
        )


def _say(message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.warning(message)


# --- checkpoints ---------------------------------------------------------------------------------


class _Counted:
    """What our checkpointers add to torchtune's: the meter's totals, and a phase."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load, and let the meter and the run go on from the totals that are there."""
        loaded = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        state = loaded.pop(STATE_KEY, None)
        if _current is not None:
            if state is not None:
                _current.meter.load_state_dict(state)
            _current.open(resume_step=None if state is None else state["step"])
        return loaded

    def save_checkpoint(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save, with the totals beside the recipe's own state. No time of training."""
        phase: Any = nullcontext()
        if _current is not None:
            state_dict[STATE_KEY] = _current.meter.state_dict()
            phase = _current.meter.phase("checkpoint")
        with phase:
            super().save_checkpoint(state_dict, *args, **kwargs)  # type: ignore[misc]


class FullModelTorchTuneCheckpointer(_Counted, training.FullModelTorchTuneCheckpointer):  # type: ignore[misc]
    """`torchtune.training.FullModelTorchTuneCheckpointer`, with the meter's totals."""


class FullModelHFCheckpointer(_Counted, training.FullModelHFCheckpointer):  # type: ignore[misc]
    """`torchtune.training.FullModelHFCheckpointer`, with the meter's totals."""


class FullModelMetaCheckpointer(_Counted, training.FullModelMetaCheckpointer):  # type: ignore[misc]
    """`torchtune.training.FullModelMetaCheckpointer`, with the meter's totals."""

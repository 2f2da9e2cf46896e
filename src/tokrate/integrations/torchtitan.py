"""torchtitan: components for a trainer's configuration, put in place by one call.

    dataloader ──► counts ──► meter of the MetricsProcessor ──► record ──► journal
    validator, checkpointer ──► phases, and totals in the checkpoint

Each component builds on torchtitan's own of the same name. They find each other: a process trains
once, and its `MetricsProcessor` is built before all others.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from tokrate import ends
from tokrate.config import parse_logger
from tokrate.errors import ConfigError
from tokrate.integrations import check_version
from tokrate.logger import Logger
from tokrate.meter import ThroughputMeter
from tokrate.names import legal_name
from tokrate.opening import find_factories, open_logger
from tokrate.ranks import RankLayout
from tokrate.run import RunInfo

check_version("torchtitan")

import tyro  # noqa: E402
from torchtitan.components import metrics, validate  # noqa: E402
from torchtitan.components.checkpointer import dcp  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402

log = logging.getLogger("tokrate")

STATE_KEY = "tokrate"
"""Key of the meter's totals in torchtitan's checkpoints."""
THEIR_RATE = "throughput(tps)"

_current: MetricsProcessor | None = None


def with_tokrate(config: Any, **options: Any) -> Any:
    """Put the components into a trainer's configuration, in place of torchtitan's own.

    Args:
        config: What a function of a `config_registry` returns. It is changed.
        options: Fields of `MetricsProcessor.Config`: `logger`, `name`, `id`, `dir` and so on.

    Returns:
        The configuration.

    Raises:
        ConfigError: There is no such option, or the logger key is wrong.
    """
    known = {f.name for f in dataclasses.fields(MetricsProcessor.Config)}
    if unknown := sorted(set(options) - known):
        raise ConfigError(
            f"with_tokrate: no option {', '.join(unknown)}: expected some of "
            f"{', '.join(sorted(known))}"
        )
    find_factories(parse_logger(options.get("logger", "none")))
    config.dataloader = DataLoader.Config(source=config.dataloader)
    _replace(config, "metrics", metrics.MetricsProcessor.Config, MetricsProcessor.Config, options)
    _replace(config, "checkpoint", dcp.CheckpointManager.Config, CheckpointManager.Config)
    _replace(config, "validator", validate.Validator.Config, Validator.Config)
    return config


def _replace(
    config: Any,
    name: str,
    theirs: type[Any],
    ours: type[Any],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Take over the fields of torchtitan's own component; leave any other one alone."""
    found: Any = getattr(config, name)
    if type(found) is theirs:
        fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
        setattr(config, name, ours(**fields, **(options or {})))
    elif options is not None:
        raise ConfigError(
            f"the configuration has {type(found).__qualname__} as {name}: expected torchtitan's "
            f"own; derive yours from {ours.__module__}.{ours.__qualname__}"
        )
    else:
        log.warning(
            f"{name} is {type(found).__qualname__}, not torchtitan's own: it is left as it is, and "
            "its time is time of training"
        )


# --- measuring -----------------------------------------------------------------------------------


class MetricsProcessor(metrics.MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics, with a record at each of its logs; all go to the journal."""

    @dataclass(kw_only=True, slots=True)
    class Config(metrics.MetricsProcessor.Config):  # type: ignore[misc]
        """torchtitan's own fields, and what `open_logger` and the meter are given."""

        logger: Annotated[Any, tyro.conf.Suppress] = "none"
        """The `logger` key."""
        name: str = "torchtitan"
        """Name of the run."""
        id: str | None = None
        """Identity across restarts; needed to go on with the same run."""
        dir: str = "runs"
        """Folder in which the run's folder is made."""
        aliases: Annotated[Any, tyro.conf.Suppress] = "torchtitan"
        """As for `open_logger`."""
        peak_flops: float | None = None
        """Peak FLOP/s of one device, for `mfu`: torchtitan guesses where it does not know it."""
        logger_options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """All others of `open_logger`."""

    def __init__(self, config: Config, *, parallel_dims: Any, **kwargs: Any) -> None:
        global _current
        find_factories(parse_logger(config.logger))
        self._meter: ThroughputMeter | None = None
        self._opened: Logger | None = None
        self._recorded_step = 0
        self._config_dict = kwargs.get("config_dict")
        self._pp_schedule = kwargs.get("pp_schedule", "1F1B")
        super().__init__(config, parallel_dims=parallel_dims, **kwargs)
        loggers = metrics.LoggerContainer()
        loggers.add_logger(self.logger)
        loggers.add_logger(_ToJournal(self))
        self.logger: Any = loggers
        _current = self

    @property
    def meter(self) -> ThroughputMeter:
        """What counts. Made when it is first asked for: behind the set-up, which is no training."""
        if self._meter is None:
            flops = self.num_flops_per_token if self.config.peak_flops else None
            self._meter = ThroughputMeter(
                ranks=self.layout,
                labels_aligned=True,
                ignore_index=IGNORE_INDEX,
                strict=False,
                flops_per_token=flops,
                peak_flops=self.config.peak_flops,
            )
        return self._meter

    @property
    def layout(self) -> RankLayout:
        """Ranks of one batch share their tokens: pipeline, tensor and context parallel ones.

        They are counted as the dataloader hands them out, before anything is sharded. The rank
        that writes is the one that has the loss.
        """
        dims = self.parallel_dims
        batches = dims.get_mesh("batch").size() if dims.dp_enabled else 1
        writer = metrics._get_metrics_rank(parallel_dims=dims, pp_schedule=self._pp_schedule)
        return RankLayout(replicas=dims.world_size // batches, writer=writer)

    def open(self, resume_step: int | None = None) -> Logger:
        """The logger of the run, opened if it is not yet.

        Raises:
            TokrateError: As `open_logger`.
        """
        if self._opened is None:
            config = self.config
            run = RunInfo(
                config.name, id=config.id, config=self._config_dict, resume_step=resume_step
            )
            self._opened = open_logger(
                config.logger,
                run=run,
                dir=config.dir,
                ranks=self.layout,
                aliases=config.aliases,
                **config.logger_options,
            )
        return self._opened

    def close_window(self, step: int) -> None:
        """Record, unless no step was taken since the last record. All ranks call this."""
        if step > self._recorded_step:
            self._recorded_step = step
            self.open().log(self.meter.record(step))

    def log(self, step: int, *args: Any, **kwargs: Any) -> None:
        """Record, and log what torchtitan logs."""
        self.close_window(step)
        super().log(step, *args, **kwargs)

    def close(self) -> None:
        """End the run; torchtitan calls this within its handling of an exception, too."""
        super().close()
        self.open().close(ends.outcome_of(sys.exc_info()[1]))


class _ToJournal(metrics.BaseLogger):  # type: ignore[misc]
    """What torchtitan logs, under names that all trackers take."""

    def __init__(self, processor: MetricsProcessor) -> None:
        self._processor = processor

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        named = {
            f"torchtitan/{legal_name(name)}" if name == THEIR_RATE else legal_name(name): value
            for name, value in metrics.items()
        }
        self._processor.open().log_metrics(named, step=step)


# --- counting ------------------------------------------------------------------------------------


class DataLoader(BaseDataLoader):  # type: ignore[misc]
    """Any dataloader of torchtitan's, its batches counted as they are handed out."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The dataloader that is counted."""

        source: BaseDataLoader.Config
        """Its configuration."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.source = config.source.build(**kwargs)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.source)
        while True:
            meter = None if _current is None else _current.meter
            if meter is None:
                yield from batches
                return
            with meter.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            _count(meter, *batch)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the data goes on."""
        state: dict[str, Any] = self.source.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.source.load_state_dict(state_dict)


def _count(meter: ThroughputMeter, inputs: Mapping[str, Any], labels: Any) -> None:
    """Count a batch; its labels stand where the loss reads them."""
    positions = inputs.get("positions")
    if positions is None or positions.shape != labels.shape:
        meter.update(labels=labels)
    else:
        meter.update(labels=labels, attention_mask=_real(inputs["input"], positions, labels))


def _real(tokens: Any, positions: Any, labels: Any) -> Any:
    """True on slots that hold a token. torchtitan makes the padding of a row its last document.

    It repeats one token, its positions begin at 0 again, and none of it is a target.
    """
    real = labels == labels
    for row in (labels[:, -1] == IGNORE_INDEX).nonzero().flatten().tolist():
        start = int((positions[row] == 0).nonzero()[-1]) if (positions[row] == 0).any() else 0
        tail = tokens[row, start:]
        if (tail == tail[0]).all() and (labels[row, start:] == IGNORE_INDEX).all():
            real[row, start:] = False
    return real


# --- phases --------------------------------------------------------------------------------------


class Validator(validate.Validator):  # type: ignore[misc]
    """torchtitan's validator; its time and tokens are no training."""

    @dataclass(kw_only=True, slots=True)
    class Config(validate.Validator.Config):  # type: ignore[misc]
        """torchtitan's own fields."""

    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """Validate, in a phase."""
        if _current is None:
            return super().validate(*args, **kwargs)
        with _current.meter.phase("eval"):
            return super().validate(*args, **kwargs)


class CheckpointManager(dcp.CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoints, with the meter's totals; their time is no training."""

    @dataclass(kw_only=True, slots=True)
    class Config(dcp.CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own fields."""

    def __init__(self, config: Config, *, states: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(config, states=states, **kwargs)
        if self.enable:
            self.states[STATE_KEY] = _Totals()

    def _load(self, step: int = -1) -> bool:
        loaded: bool = super()._load(step)
        if _current is not None:
            _current.open(resume_step=_current._recorded_step or None)
        return loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if _current is None or not self._should_save(curr_step, last_step):
            return bool(super()._save(curr_step, last_step))
        _current.close_window(curr_step)  # so that the totals in the checkpoint are whole
        with _current.meter.phase("checkpoint"):
            return bool(super()._save(curr_step, last_step))


class _Totals:
    """The meter's state, as torch.distributed.checkpoint asks for it."""

    def state_dict(self) -> dict[str, Any]:
        return {} if _current is None else dict(_current.meter.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if _current is not None:
            _current.meter.load_state_dict(state_dict)
            _current._recorded_step = int(state_dict["step"])

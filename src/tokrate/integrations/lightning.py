"""Lightning: a callback that counts and records, and a logger that writes to the journal.

    Trainer ──► TokrateCallback ──► record ──┐
       └──────► self.log(...) ──────────────────┴─► TokrateLogger ──► journal ──► trackers

The callback alone serves those who keep the loggers they have: it sends its numbers to them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tokrate.collate import ARGUMENTS
from tokrate.errors import ConfigError
from tokrate.integrations import check_version
from tokrate.meter import ThroughputMeter
from tokrate.names import MetricNames
from tokrate.ranks import RankLayout
from tokrate.reading import read_inputs
from tokrate.watching import Claim, claim_model

check_version("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

from tokrate.integrations._lightning_logger import TokrateLogger  # noqa: E402

__all__ = ["TokrateCallback", "TokrateLogger"]

Fields = Mapping[str, str | int] | Callable[[Any], Mapping[str, Any]]
"""Where a batch has what: argument of `count_tokens` to key or position, or a function of the
batch that returns the arguments."""

FETCH = "[_TrainingEpochLoop].train_dataloader_next"
SAVE = "save_checkpoint"


class TokrateCallback(Callback):
    """Counts every batch of `fit`, and records every `log_every_n_steps`.

    Evaluation, the sanity check and checkpoints are phases. Totals go into the checkpoint. Records
    go to all loggers of the trainer: as they are to a `TokrateLogger`, as numbers to others.

    Args:
        meter: None makes one that never raises because of a batch, for the ranks of the trainer's
            strategy. Pass your own for `labels_aligned`, `pad_id`, `flops_per_token` and so on.
        fields: Where the batch has what, where it is no dict with the names of `count_tokens`.

    Raises:
        ConfigError: `fields` names what `count_tokens` does not take.
    """

    def __init__(
        self, meter: ThroughputMeter | None = None, *, fields: Fields | None = None
    ) -> None:
        if isinstance(fields, Mapping) and (unknown := sorted(set(fields) - set(ARGUMENTS))):
            raise ConfigError(
                f"fields= names {', '.join(unknown)}: expected arguments of count_tokens "
                f"({', '.join(ARGUMENTS)}) with the key or position of each in the batch"
            )
        self._meter = meter
        self._fields = fields
        self._names = MetricNames()
        self._spans = _Spans()
        self._claim: Claim | None = None
        self._is_mine = meter is None
        self._batch_comes_late = False
        self._parts: list[Mapping[str, Any]] = []
        self._recorded_step = 0
        self._training = False

    @property
    def meter(self) -> ThroughputMeter:
        """What counts; made when `fit` begins unless one was given.

        Raises:
            ConfigError: `fit` has not begun.
        """
        if self._meter is None:
            raise ConfigError("the callback has no meter yet: trainer.fit makes it, or pass one")
        return self._meter

    # --- the life of a fit -----------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Get ready to count: what happens from here to the first batch is no training."""
        if stage != "fit":
            return
        if self._meter is None:
            self._meter = ThroughputMeter(ranks=_layout(trainer), strict=False)
        self._claim = claim_model(pl_module, "the Lightning callback")
        self._batch_comes_late = (
            "dataloader_iter" in inspect.signature(pl_module.training_step).parameters
        )
        self._spans.open("outside", self.meter.phase("outside of fit"))
        self._listen(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the first window, at the step from which a checkpoint goes on."""
        step = trainer.global_step
        state = self.meter.state_dict()
        if state["step"] != step:  # a checkpoint without our state, or a new trainer
            self.meter.load_state_dict(state | {"step": step, "session": state["session"] - 1})
        for logger in trainer.loggers:
            if isinstance(logger, TokrateLogger):
                logger.open(resume_step=step or None)
        self._recorded_step = step
        self._training = True
        self._spans.close("outside")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what is left."""
        self._close_window(trainer)
        self._training = False
        self._spans.open("outside", self.meter.phase("outside of fit"))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Tidy up: Lightning calls no `teardown` then."""
        self._training = False
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop listening, and let others count the model."""
        if stage == "fit":
            self._spans.close("listening", "eval", SAVE, FETCH)
            if self._claim is not None:
                self._claim.release()

    # --- counting --------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take hold of the parts of the batch, which a training step may take out of it."""
        if not self._batch_comes_late:
            self._parts = self._read(batch)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch that was trained on, and record where a step is due."""
        if self._batch_comes_late:
            self._parts = self._read(batch)
        if self._claim is not None:
            for parts in self._parts:
                self.meter.update(**parts)
        self._parts = []
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step // every > self._recorded_step // every:
            self._close_window(trainer)

    def _read(self, batch: Any) -> list[Mapping[str, Any]]:
        try:
            parts = self._find(batch)
        except Exception as error:  # noqa: BLE001 - whatever a batch is, training goes on
            parts, found = [], repr(error)
        else:
            if all(p.get("labels") is not None or "loss_mask" in p for p in parts):
                return parts
            found = ", ".join(f"{key}" for part in parts for key in part) or "nothing of a count"
        self.meter.lose(
            f"the Lightning callback cannot count a batch, a {type(batch).__name__} "
            f"({_described(batch)}; found: {found}): expected labels or loss_mask. Say where they "
            'are with TokrateCallback(fields={"input_ids": 0, "labels": 1}) or the like, or '
            "with a function of the batch"
        )
        return []

    def _find(self, batch: Any) -> list[Mapping[str, Any]]:
        if callable(self._fields):
            return [self._fields(batch)]
        if self._fields is not None:
            return [{name: batch[place] for name, place in self._fields.items()}]
        return list(read_inputs(batch, pad_id=self.meter.pad_id))

    # --- recording -------------------------------------------------------------------------------

    def _close_window(self, trainer: Trainer) -> None:
        """Record, unless no step was taken since the last record."""
        step = trainer.global_step
        if not self._training or step <= self._recorded_step:
            return
        if self._claim is None and self._is_mine:
            return  # somebody else counts, into a meter of their own
        record = self.meter.record(step)
        self._recorded_step = step
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TokrateLogger):
                logger.log(record)
            else:
                logger.log_metrics(record.metrics(self._names), step=record.step)

    def state_dict(self) -> dict[str, Any]:
        """The meter's totals, for the checkpoint."""
        return {} if self._meter is None else self._meter.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the totals of a checkpoint."""
        self.meter.load_state_dict(state_dict)

    # --- phases ----------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation is no training."""
        if self._training:
            self._spans.open("eval", self.meter.phase("eval"))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        self._spans.close("eval")

    def _listen(self, trainer: Trainer) -> None:
        """Hear of what no hook tells: when a checkpoint is saved, and a batch is waited for.

        Lightning tells its profiler, whichever that is, on all ranks.
        """
        spans = self._spans

        def on_start(action: str) -> None:
            if action == SAVE:
                self._close_window(trainer)  # so that the totals in the checkpoint are whole
                spans.open(SAVE, self.meter.phase("checkpoint"))
            elif action == FETCH:
                spans.open(FETCH, self.meter.waiting())

        profiler = trainer.profiler  # type: ignore[attr-defined]
        spans.open("listening", _listening(profiler, on_start, spans.close))


# --- inside --------------------------------------------------------------------------------------


class _Spans:
    """Spans of time that begin in one hook and end in another."""

    def __init__(self) -> None:
        self._open: dict[str, AbstractContextManager[Any]] = {}

    def open(self, name: str, span: AbstractContextManager[Any]) -> None:
        """Begin a span, unless one of that name is open."""
        if name not in self._open:
            self._open[name] = span
            span.__enter__()

    def close(self, *names: str) -> None:
        """End the spans of these names that are open."""
        for name in names:
            if span := self._open.pop(name, None):
                span.__exit__(None, None, None)


@contextmanager
def _listening(
    profiler: Any, on_start: Callable[[str], None], on_stop: Callable[[str], None]
) -> Iterator[None]:
    """Hear what a profiler is told."""
    start, stop = profiler.start, profiler.stop

    def start_and_tell(action_name: str) -> None:
        start(action_name)
        on_start(action_name)

    def stop_and_tell(action_name: str) -> None:
        on_stop(action_name)
        stop(action_name)

    profiler.start, profiler.stop = start_and_tell, stop_and_tell
    try:
        yield
    finally:
        profiler.start, profiler.stop = start, stop


def _layout(trainer: Trainer) -> RankLayout:
    """Which ranks of the trainer's strategy are fed different batches."""
    if isinstance(trainer.strategy, ModelParallelStrategy):
        return RankLayout.from_mesh(trainer.strategy.device_mesh, distinct=("data_parallel",))
    return RankLayout()


def _described(batch: Any) -> str:
    """What a batch is made of."""
    if isinstance(batch, Mapping):
        return f"with the keys {', '.join(map(str, batch))}"
    return f"of {len(batch)} parts" if isinstance(batch, list | tuple) else "without parts"

"""transformers and TRL: a callback for `Trainer`, `SFTTrainer`, `DPOTrainer` and their relatives.

    on_train_begin ── opens the run, watches the model
        on_step_begin ◄── waiting for data ends
            forward ──► counted, each micro-batch
        on_step_end ── record, at the trainer's logging steps and before each checkpoint
            evaluate, save: a phase
    on_train_end ── last record, closes the run

Callbacks are shown no batch, so the batch is taken where the model is called.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tokrate import ends
from tokrate.collate import KEYS
from tokrate.config import parse_logger
from tokrate.counting import Tally
from tokrate.errors import StateError
from tokrate.finding import Finding
from tokrate.integrations import check_version
from tokrate.integrations._trainer import (
    check_options,
    name_logs,
    read_config,
    read_layout,
    read_saved,
    saves_best,
    shifts_labels,
)
from tokrate.logger import Logger
from tokrate.meter import ThroughputMeter
from tokrate.opening import open_logger
from tokrate.ranks import RankLayout
from tokrate.reading import Inputs, read_encoder_decoder, read_inputs
from tokrate.run import RunInfo
from tokrate.watching import ModelWatch, watch_model

log = logging.getLogger("tokrate")

_newest: weakref.ref[TokrateCallback] | None = None
_open: weakref.WeakSet[TokrateCallback] = weakref.WeakSet()


class TokrateCallback(TrainerCallback, ExportableState):
    """Counts what a `Trainer` trains on and writes records at its logging steps.

    Args:
        logger: The `logger` key (see `open_logger`), or a logger that is open and stays yours.
        run: Facts of the run, or its name. None takes `run_name` of the training arguments, else
            the name of `output_dir`; the configuration is that of the arguments and the model.
        dir: Folder in which the run's folder is made. None is `runs` in `output_dir`.
        ranks: Which ranks are summed; needed where ranks are fed the same batch.
        meter_options: Further arguments of `ThroughputMeter`.
        logger_options: Further arguments of `open_logger`.
        forward_logs: Whether the trainer's own numbers (`loss`, `eval_loss` …) are written too.
            None: unless `report_to` brings them to one of the same trackers.
        restored: For transformers itself, which makes a new callback when it restores one: take
            over the settings of the callback that it stands in for.

    Raises:
        ConfigError: The `logger` key, or an option's name, is wrong.
    """

    def __init__(
        self,
        logger: Any = "none",
        *,
        run: RunInfo | str | None = None,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002 - as open_logger has it
        ranks: RankLayout | None = None,
        meter_options: Mapping[str, Any] | None = None,
        logger_options: Mapping[str, Any] | None = None,
        forward_logs: bool | None = None,
        restored: bool = False,
    ) -> None:
        global _newest
        former = _newest() if _newest is not None else None
        if restored and former is not None:
            self.__dict__.update(former.__dict__)
        else:
            self._spec = logger
            self._run = RunInfo(run) if isinstance(run, str) else run
            self._dir = dir
            self._ranks = ranks
            self._meter_options = dict(meter_options or {})
            self._logger_options = dict(logger_options or {})
            self._forward_logs = forward_logs
            check_options(logger, self._meter_options, self._logger_options)
        self.saved: Mapping[str, Any] | None = None
        self.meter: ThroughputMeter | None = None
        """The meter of the training that goes on, or of the last one."""
        self.logger: Logger | None = None
        """The logger of the training that goes on, or of the last one."""
        self._state: Any = None
        self._model: Any = None
        self._watch: ModelWatch | None = None
        self._pause = ExitStack()
        self._wait = ExitStack()
        self._items_due = False
        _newest = weakref.ref(self)

    # --- what the trainer calls ------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run and watch the model."""
        for package in ("transformers", "trl"):
            if package in sys.modules:
                check_version(package)
        for other in [other for other in _open if other._state is not state]:
            if other is self or other._model is kwargs["model"]:
                other._end("failed")  # training ended with an exception, which no callback is told
        self._state, self._model = state, kwargs["model"]
        self._args = args
        saved = read_saved(state, type(self).__name__)
        self.meter = self._make_meter(kwargs.get("processing_class"), saved)
        self._watch = watch_model(
            self._model,
            self.meter,
            read=self._read,
            holder="TokrateCallback",
            before=self._before_forward,
        )
        if not self._watch.active:
            return
        try:
            self.logger = self._open_logger(saved)
        except BaseException:
            self._watch.remove()
            raise
        _open.add(self)
        if self.logger is not self._spec:
            ends.needs_word(id(self.logger))  # a script may catch the exception, and be done
        # Else transformers cannot save, where it goes on from a checkpoint made without us.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self._begin_wait()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The batches of the step have come."""
        if self._active:
            self._wait.close()
            self._pause.close()
            self._items_due = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record if the trainer logs or saves now; what it does next may be no training."""
        self._close_step(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As `on_step_end`, for what is done once an epoch."""
        self._close_step(control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the trainer's own numbers beside the records."""
        if not self._active or self.logger is None:
            return
        if self._forwards:
            numbers = {
                key: value for key, value in kwargs["logs"].items() if not isinstance(value, str)
            }
            self.logger.log_metrics(name_logs(numbers), step=state.global_step)
        self._begin_wait()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluation is over, unless it has a checkpoint to follow."""
        if not (control.should_save or saves_best(args)):
            self._resume()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint is written."""
        self._resume()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record what is left and close the run."""
        if self._active:
            self._record()
            self.saved = self.state()["attributes"]["saved"]
            self._end("finished")

    def state(self) -> dict[str, Any]:
        """What transformers keeps in a checkpoint: the totals, and which run it is."""
        saved = self.saved
        if self._active and self.meter is not None and self.logger is not None:
            saved = {"meter": self.meter.state_dict(), "run_id": self.logger.run.id}
        return {"args": {"restored": True}, "attributes": {"saved": saved}}

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return self._watch is not None and self._watch.active

    def _make_meter(self, tokenizer: Any, saved: Mapping[str, Any] | None) -> ThroughputMeter:
        options = {
            "pad_id": getattr(tokenizer, "pad_token_id", None),
            "labels_aligned": not shifts_labels(self._model),
            "strict": False,
            "ranks": self._ranks or read_layout(self._args),
        }
        meter = ThroughputMeter(**{**options, **self._meter_options})
        if saved is not None:
            try:
                meter.load_state_dict(saved["meter"])
            except (KeyError, StateError) as error:
                log.warning(f"totals begin anew: the checkpoint's cannot be read: {error}")
        return meter

    def _open_logger(self, saved: Mapping[str, Any] | None) -> Logger:
        if isinstance(self._spec, Logger):
            return self._spec
        step = self._state.global_step or None
        run = self._run or RunInfo(
            self._args.run_name or Path(self._args.output_dir).resolve().name
        )
        run = replace(
            run,
            id=run.id or (saved or {}).get("run_id"),
            config=read_config(self._args, self._model) if run.config is None else run.config,
            resume_step=step if run.resume_step is None else run.resume_step,
        )
        return open_logger(
            self._spec,
            run=run,
            dir=self._dir or Path(self._args.output_dir) / "runs",
            ranks=self.meter.ranks if self.meter else None,
            **self._logger_options,
        )

    @property
    def _forwards(self) -> bool:
        if self._forward_logs is not None or isinstance(self._spec, Logger):
            return self._forward_logs is not False
        ours = {backend.name for backend in parse_logger(self._spec).backends}
        return not ours & set(self._args.report_to or ())

    def _read(self, inputs: Inputs) -> list[dict[str, Any]]:
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            batches = read_encoder_decoder(inputs)
        else:
            batches = read_inputs(inputs, pad_id=self.meter.pad_id if self.meter else None)
        if any("labels" in batch or "loss_mask" in batch for batch in batches):
            return batches
        return self._read_without_labels(inputs, batches[0])

    def _read_without_labels(self, inputs: Inputs, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """The trainer computes the loss itself and kept the labels; it may have told their number.

        `num_items_in_batch` is that of the whole step, over all ranks where the loss is.
        """
        items, ids = inputs.get("num_items_in_batch"), batch.get("input_ids")
        if items is None or ids is None or self.meter is None or getattr(items, "ndim", 0) > 0:
            if self.meter is not None:
                self.meter.lose(
                    f"the model was called with {', '.join(sorted(set(inputs) & set(KEYS)))}: "
                    "nothing says which tokens are targets. Expected labels; where the trainer "
                    "takes them out before the model is called (label smoothing, "
                    "compute_loss_func), they cannot be counted here"
                )
            return []
        mine = self.meter.ranks.is_writer or not self._args.average_tokens_across_devices
        if self._items_due and mine:
            self.meter.add(
                Finding(Tally(0, items.long() if hasattr(items, "long") else items, 0, None))
            )
        self._items_due = False
        return [{**batch, "loss_mask": ids.new_zeros(ids.shape)}]

    def _before_forward(self, training: bool) -> None:
        """Evaluation that nobody announced, as other callbacks may do it, is a phase too."""
        if training:
            self._wait.close()
            self._pause.close()
        else:
            self._begin_pause("eval")

    def _close_step(self, control: Any) -> None:
        if not self._active:
            return
        best = control.should_evaluate and saves_best(self._args)
        if control.should_log or control.should_save or best:
            self._record()
        if control.should_evaluate or control.should_save:
            self._begin_pause("eval" if control.should_evaluate else "checkpoint")
        elif not control.should_log:  # else on_log begins it: logging is no wait for data
            self._begin_wait()

    def _record(self) -> None:
        """Close the window, unless no step was made since the last one."""
        if self.meter is None or self.logger is None:
            return
        step = self._state.global_step
        if step > self.meter.last_step:
            self.logger.log(self.meter.record(step))

    def _begin_pause(self, name: str) -> None:
        self._wait.close()
        if self.meter is not None and not self.meter.paused:
            self._pause.enter_context(self.meter.phase(name))

    def _begin_wait(self) -> None:
        if self.meter is not None and not self.meter.paused:
            self._wait.close()
            self._wait.enter_context(self.meter.waiting())

    def _resume(self) -> None:
        if self._active:
            self._pause.close()
            self._begin_wait()

    def _end(self, outcome: str) -> None:
        self._wait.close()
        self._pause.close()
        if self._watch is not None:
            self._watch.remove()
        if self.logger is not None and self.logger is not self._spec:
            self.logger.close(outcome)
        _open.discard(self)

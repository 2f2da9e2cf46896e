"""Accelerate: a tracker for `log_with=`, which also counts what the model is trained on.

Accelerator(log_with=tracker) ──► init_trackers ──► the run is opened, with its configuration
tracker.watch(model)          ──► each micro-batch is counted
tracker.record(step)          ──► a record                          (all processes)
accelerator.log(values, step) ──► your own numbers, in the same run
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accelerate.tracking import GeneralTracker

from tokrate.config import parse_logger
from tokrate.errors import ConfigError
from tokrate.integrations import check_version
from tokrate.logger import Logger
from tokrate.meter import ThroughputMeter
from tokrate.opening import find_factories, open_logger
from tokrate.ranks import RankLayout
from tokrate.record import ThroughputRecord
from tokrate.run import RunInfo
from tokrate.watching import ModelWatch, watch_model

log = logging.getLogger("tokrate")


class TokrateTracker(GeneralTracker):  # type: ignore[misc]
    """Writes what `accelerator.log` is given, and records, to the journal and every backend.

    Args:
        run: Facts of the run, or its name.
        logger: The `logger` key; see `open_logger`.
        dir: Folder in which the run's folder is made.
        ranks: Which ranks are summed; needed where processes are fed the same batch.
        meter_options: Further arguments of `ThroughputMeter`.
        logger_options: Further arguments of `open_logger`.

    Raises:
        ConfigError: The `logger` key, or an option's name, is wrong.
    """

    name = "tokrate"
    requires_logging_directory = False

    def __init__(
        self,
        run: RunInfo | str,
        logger: Any = "none",
        *,
        dir: str | os.PathLike[str] = "runs",  # noqa: A002 - as open_logger has it
        ranks: RankLayout | None = None,
        meter_options: Mapping[str, Any] | None = None,
        logger_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_version("accelerate")
        self._run = RunInfo(run) if isinstance(run, str) else run
        self._spec = logger
        self._dir = dir
        self._ranks = ranks
        self._meter_options = {"strict": False, **(meter_options or {})}
        self._logger_options = dict(logger_options or {})
        self._logger: Logger | None = None
        self._meter: ThroughputMeter | None = None
        self._watch: ModelWatch | None = None
        self._step = 0
        find_factories(parse_logger(logger))
        self._make_meter()  # says now what is wrong with its options

    # --- what a script calls ---------------------------------------------------------------------

    @property
    def meter(self) -> ThroughputMeter:
        """The meter, which begins to measure when it is first asked for.

        For phases, `meter.watch(loader)`, and `accelerator.register_for_checkpointing`.
        """
        if self._meter is None:
            self._meter = self._make_meter()
        return self._meter

    def watch(self, model: Any, **options: Any) -> ModelWatch:
        """Count what the model is trained on, from now on; call it after `prepare`.

        Args:
            model: The model, as `accelerator.prepare` returned it.
            options: `fields` and `read`, as for `tokrate.watch_model`.
        """
        self._open()
        self._watch = watch_model(model, self.meter, holder="TokrateTracker", **options)
        return self._watch

    def record(self, step: int) -> ThroughputRecord:
        """Close the window and write its record. All processes call this, at the same steps.

        Args:
            step: Optimizer steps done so far.

        Raises:
            MeterError: As `ThroughputMeter.record`.
            RankError: Another process did not call it, or with another step.
        """
        record = self.meter.record(step)
        self._step = step
        self._open().log(record)
        return record

    # --- what Accelerate calls -------------------------------------------------------------------

    @property
    def tracker(self) -> Logger:
        """The open logger."""
        return self._open()

    def start(self) -> None:
        """Called by `init_trackers`. The run is opened once its configuration is there."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Open the run with this configuration."""
        if self._logger is not None:
            log.warning(
                "the configuration came when the run was open already, and is not kept: expected "
                "accelerator.init_trackers(..., config=...) before the first log, watch or record"
            )
        elif self._run.config is None:
            self._run = replace(self._run, config=dict(values))
        self._open()

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write numbers; without a step, at that of the last ones."""
        if options:
            log.warning(f"log_kwargs {sorted(options)} are not known to tokrate and left out")
        self._step = self._step if step is None else step
        self._open().log_metrics(values, step=self._step)

    def finish(self) -> None:
        """Close the run; called by `end_training`."""
        if self._watch is not None:
            self._watch.remove()
        if self._logger is not None:
            self._logger.close()

    # --- inside ----------------------------------------------------------------------------------

    def _open(self) -> Logger:
        if self._logger is None:
            self._logger = open_logger(
                self._spec, run=self._run, dir=self._dir, ranks=self._ranks, **self._logger_options
            )
        return self._logger

    def _make_meter(self) -> ThroughputMeter:
        try:
            return ThroughputMeter(ranks=self._ranks, **self._meter_options)
        except TypeError as error:
            raise ConfigError(
                f"meter_options: {error}; expected those of ThroughputMeter"
            ) from None

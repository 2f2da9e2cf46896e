"""The logger of the Lightning integration: what a `Trainer` logs goes into tokrate's journal."""

from __future__ import annotations

import inspect
import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from lightning.pytorch.loggers import Logger as LightningLogger
from lightning.pytorch.utilities import rank_zero_only

from tokrate import ends
from tokrate.config import parse_logger
from tokrate.errors import ConfigError
from tokrate.folder import check_run
from tokrate.logger import Logger
from tokrate.names import MetricNames
from tokrate.opening import find_factories, open_logger
from tokrate.record import ThroughputRecord
from tokrate.run import Outcome, RunInfo


class TokrateLogger(LightningLogger):
    """Sends all metrics of a `Trainer` or `Fabric` to tokrate's journal, and so to all trackers.

    The run begins with `fit`, when its hyperparameters are known. It ends as failed when `fit`
    fails, and otherwise with the process or with `close`: evaluations may follow a fit.

    Args:
        spec: The `logger` key, as for `open_logger`.
        run: Facts of the run. With an `id`, a fit from a checkpoint goes on with the same run.
        dir: Folder in which the run's folder is made.
        options: All others of `open_logger`.

    Raises:
        ConfigError: The key, an option, a name or a package is wrong.
    """

    def __init__(
        self,
        spec: Any,
        *,
        run: RunInfo,
        dir: str | Path = "runs",  # noqa: A002 - the word that people use
        **options: Any,
    ) -> None:
        super().__init__()
        try:
            inspect.signature(open_logger).bind(spec, run=run, dir=dir, **options)
        except TypeError as error:
            raise ConfigError(f"TokrateLogger: {error}: expected those of open_logger") from None
        find_factories(parse_logger(spec))
        self._spec = spec
        self._run = check_run(run)
        self._dir = dir
        self._options = options
        self._logger: Logger | None = None
        self._step = 0

    # --- what Lightning asks for -----------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._run.name

    @property
    def version(self) -> str:
        """Id of the run: it is part of the path of checkpoints, which runs must not share."""
        return str(self._run.id)

    @property
    def save_dir(self) -> str:
        """Folder of all runs."""
        return str(self._dir)

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Add to the configuration of the run, as long as it has not begun."""
        if self._logger is None:
            params = vars(params) if isinstance(params, Namespace) else params
            config = {**(self._run.config or {}), **params}
            self._run = replace(self._run, config=config)

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Open the run: Lightning calls this once, before training, behind `log_hyperparams`.

        A fit from a checkpoint begins later, when the step is known.
        """
        trainer = getattr(model, "_trainer", None)
        if trainer is None or not trainer.ckpt_path:
            self.open()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log to the journal. Without a step, at that of the metrics before."""
        self._step = self._step if step is None else step
        self.open().log_metrics(metrics, step=self._step)

    def finalize(self, status: str) -> None:
        """End the run if the fit failed, or if this process does nothing else."""
        if status == "failed":
            self.close(ends.outcome_of(sys.exc_info()[1] or RuntimeError(status)))
        elif multiprocessing.parent_process() is not None:
            self.close()  # a rank that Lightning spawned: no exit handler runs there

    # --- what others call ------------------------------------------------------------------------

    def open(self, resume_step: int | None = None) -> Logger:
        """The logger of the run, opened if it is not yet. Other ranks have one that does nothing.

        Args:
            resume_step: Step of the checkpoint that training goes on from.

        Raises:
            TokrateError: As `open_logger`.
        """
        if self._logger is None:
            if rank_zero_only.rank:  # type: ignore[attr-defined]
                names = MetricNames(self._options.get("prefix", "throughput"))
                self._logger = Logger(run=self._run, names=names, journal=None)
            else:
                run = replace(self._run, resume_step=resume_step or self._run.resume_step)
                self._logger = open_logger(self._spec, run=run, dir=self._dir, **self._options)
        return self._logger

    def log(self, record: ThroughputRecord) -> None:
        """Log a record: what `TokrateCallback` does, and a loop under Fabric."""
        self.open().log(record)

    def close(self, outcome: Outcome | str | None = None) -> None:
        """End the run in every tracker; as `Logger.close`."""
        if self._logger is not None:
            self._logger.close(outcome)
            self._logger = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(ends.outcome_of(error))

"""Ray Train: the run of a `TorchTrainer`, as each of its workers holds it.

worker 0: meter ─┐                 ┌─► journal on the shared storage ──► trackers
worker 1: meter ─┴─ one record ────┤
worker n: meter ─┘                 └─► checkpoint: totals ──► the workers after a failure
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokrate.errors import ConfigError, RunFolderError, StateError
from tokrate.integrations import check_version
from tokrate.journal import JOURNAL_NAME
from tokrate.logger import Logger
from tokrate.meter import ThroughputMeter
from tokrate.opening import open_logger
from tokrate.ranks import distributed
from tokrate.record import ThroughputRecord
from tokrate.run import RunInfo

check_version("ray")

import ray.train  # noqa: E402

STATE_NAME = "tokrate.json"
"""File in a checkpoint's folder that holds the totals."""


class TrainRun:
    """The meter and the logger of one worker. Made by `open_run`."""

    def __init__(self, meter: ThroughputMeter, logger: Logger, resume_step: int | None) -> None:
        self.meter = meter
        """Counts the batches of this worker."""
        self.logger = logger
        """Writes on the worker of rank 0; does nothing on the others."""
        self.step = resume_step or 0
        """Optimizer steps done before: those of the checkpoint that the workers go on from."""

    def record(self, step: int, metrics: Mapping[str, Any] | None = None) -> ThroughputRecord:
        """Close the window and log it. All workers call this at the same steps.

        Args:
            step: Optimizer steps done so far.
            metrics: Numbers of your own, logged at the same step.

        Raises:
            TokrateError: As `ThroughputMeter.record`.
        """
        record = self.meter.record(step)
        self.logger.log(record)
        if metrics:
            self.logger.log_metrics(metrics, step=step)
        return record

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Put the totals into a checkpoint's folder, before it is reported.

        Call it right after `record`, so that no open window is left out. The totals are the same
        on all workers: it is enough to save them on one.

        Args:
            folder: What `ray.train.Checkpoint.from_directory` is made of.
        """
        Path(folder, STATE_NAME).write_text(json.dumps(self.meter.state_dict()))


@contextmanager
def open_run(
    logger: Any = "none",
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    dir: str | os.PathLike[str] | None = None,  # noqa: A002 - as open_logger has it
    meter: ThroughputMeter | None = None,
    **options: Any,
) -> Iterator[TrainRun]:
    """Open the run in a `train_loop_per_worker`, and go on from the checkpoint if there is one.

    Args:
        logger: The `logger` key, as for `open_logger`.
        name: Name of the run; that of the experiment if None.
        config: Configuration of the run, shown by the trackers.
        tags: Short words to find the run by.
        dir: Folder in which the run's folder is made, the same on all machines that may run the
            worker of rank 0; None: `runs` in the experiment's folder on Ray's storage.
        meter: None makes one that never raises because of a batch.
        options: All others of `open_logger`.

    Raises:
        TokrateError: As `open_logger`, and where this is no worker of a `TorchTrainer`.
    """
    context = _context()
    experiment = context.get_experiment_name()
    meter = meter or ThroughputMeter(strict=False)
    folder = _shared_folder(context) if dir is None else Path(dir)
    name = name or experiment
    state = _saved_state()
    if state is not None:
        meter.load_state_dict(state)
        step: int | None = int(state["step"])
    else:
        # Workers that failed before the first checkpoint: all that they logged is done again.
        step = 0 if (folder / name / JOURNAL_NAME).exists() else None
    run = RunInfo(name, id=experiment, config=config, tags=tuple(tags), resume_step=step)
    with open_logger(logger, run=run, dir=folder, ranks=meter.ranks, **options) as opened:
        yield TrainRun(meter, opened, step)


def _context() -> Any:
    """Ray's context of this worker.

    Raises:
        ConfigError: There is none, or several workers have no process group.
    """
    try:
        context = ray.train.get_context()
        size = context.get_world_size()
    except Exception as error:
        raise ConfigError(
            f"open_run was called outside of a Ray Train worker ({error}): expected a call within "
            "train_loop_per_worker of a TorchTrainer"
        ) from error
    if size > 1 and distributed() is None:
        raise ConfigError(
            f"{size} workers and no torch.distributed process group, so that their tokens cannot "
            "be added up: expected a ray.train.torch.TorchTrainer, which makes one"
        )
    return context


def _shared_folder(context: Any) -> Path:
    """`runs` in the experiment's folder on Ray's storage.

    Raises:
        RunFolderError: The storage is no folder, but a bucket: a journal cannot be appended to.
    """
    try:
        storage = context.get_storage()
        kind, path = storage.storage_filesystem.type_name, storage.experiment_fs_path
    except (AttributeError, NotImplementedError):  # local mode, without workers
        return Path("runs")
    if kind != "local":
        raise RunFolderError(
            f"the experiment lies on {kind} storage, and a journal needs a folder: expected dir=, "
            "a folder that all machines share (NFS, say)"
        )
    return Path(path) / "runs"


def _saved_state() -> Mapping[str, Any] | None:
    """The totals in the checkpoint that the workers go on from, if there are any.

    Raises:
        StateError: They cannot be read.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        path = Path(folder, STATE_NAME)
        if not path.exists():
            return None
        try:
            state: Mapping[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise StateError(
                f"{path} cannot be read ({error}): expected what save wrote"
            ) from error
    return state

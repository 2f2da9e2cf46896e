"""Lightning really trains here, and each record is compared with a count by hand."""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tokrate import RunInfo, ThroughputMeter, integrations, watch_model
from tokrate.errors import ConfigError
from tokrate.integrations.lightning import TokrateCallback, TokrateLogger

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:"),  # Lightning on torch's trees
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:.*need to define a `flops_per_batch` attribute"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTHS = (3, 9, 5, 1, 7, 2, 8, 4)
DOCUMENTS = [torch.arange(1, 1 + length) for length in LENGTHS]

# By hand, two documents a batch: widths 9, 5, 7, 8; a first token has no target.
ROWS = 2
RAW = [ROWS * width for width in (9, 5, 7, 8)]
ACTIVE = [2 + 8, 4 + 0, 6 + 1, 7 + 3]
PADDED = [18 - 12, 10 - 6, 14 - 9, 16 - 12]


def collate(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows padded to the longest; padding is no target."""
    ids = pad_sequence(documents, batch_first=True)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loader(collate_fn: Callable[[Any], Any] = collate) -> DataLoader[Any]:
    """Four batches of two documents."""
    return DataLoader(DOCUMENTS, batch_size=ROWS, collate_fn=collate_fn)  # type: ignore[arg-type]


class Model(LightningModule):
    """The smallest language model."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Embedding(10, width), nn.Linear(width, 10))
        self.lr = 0.1

    def training_step(self, batch: Any) -> Any:
        loss = self.layers(batch["input_ids"]).mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("eval/loss", torch.tensor(1.0), batch_size=ROWS)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_trainer(**options: Any) -> Trainer:
    """A quiet trainer on one CPU."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "log_every_n_steps": 2,
    }
    return Trainer(**quiet | options)


def make_logger(folder: Path, **options: Any) -> TokrateLogger:
    """A logger that only writes the journal of the run `run`."""
    spec = {"console": False}
    return TokrateLogger(spec, run=RunInfo("run", id="run"), dir=folder, **options)


def lines(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    """All lines of the run's journal."""
    return [json.loads(line) for line in (folder / run / "journal.jsonl").read_text().splitlines()]


def records(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    """The records in a run's journal."""
    return [line["record"] for line in lines(folder, run) if "record" in line]


def fit(folder: Path, model: LightningModule | None = None, **options: Any) -> list[dict[str, Any]]:
    """Fit for an epoch, and return the records."""
    options.setdefault("callbacks", [TokrateCallback()])
    data = options.pop("data", None) or loader()
    with make_logger(folder) as logger:
        make_trainer(logger=logger, **options).fit(model or Model(), data)
    return records(folder)


def counts(record: dict[str, Any]) -> tuple[int, int, int]:
    """The three counts of a record."""
    return record["raw_tokens"], record["active_tokens"], record["padded_tokens"]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What tokrate warned of."""
    with caplog.at_level(logging.WARNING, "tokrate"):
        yield lambda: "\n".join(r.getMessage() for r in caplog.records if r.name == "tokrate")


# --- counts --------------------------------------------------------------------------------------


def test_records_are_those_of_a_hand_count(tmp_path: Path) -> None:
    """Every two optimizer steps a record has the tokens of those two batches."""
    first, second = fit(tmp_path)
    assert (first["step"], second["step"]) == (2, 4)
    assert counts(first) == (sum(RAW[:2]), sum(ACTIVE[:2]), sum(PADDED[:2]))
    assert counts(second) == (sum(RAW[2:]), sum(ACTIVE[2:]), sum(PADDED[2:]))
    assert second["total_active_tokens"] == sum(ACTIVE)
    assert second["data_wait_s"] > 0


def test_accumulation_counts_micro_batches_and_steps(tmp_path: Path) -> None:
    """With two batches a step, a record of two steps has four batches."""
    (record,) = fit(tmp_path, accumulate_grad_batches=2)
    assert (record["step"], record["steps"]) == (2, 2)
    assert counts(record) == (sum(RAW), sum(ACTIVE), sum(PADDED))


def test_the_rest_of_a_fit_is_recorded(tmp_path: Path) -> None:
    """Steps behind the last regular record get one of their own."""
    assert [r["steps"] for r in fit(tmp_path, log_every_n_steps=3)] == [3, 1]


def test_all_metrics_go_through_the_journal(tmp_path: Path) -> None:
    """What `self.log` is given, and the hyperparameters, are in the run's journal."""
    fit(tmp_path)
    first, *entries, last = lines(tmp_path)
    assert first["config"] == {"width": 4}
    losses = [e["step"] for e in entries if "train/loss" in e["metrics"]]
    assert losses == [1, 3]  # Lightning counts its steps from 0
    assert (last["kind"], last["outcome"]) == ("end", "finished")


def test_a_step_that_takes_its_batch_apart_is_counted(tmp_path: Path) -> None:
    """A batch is read before the training step, which may take out of it what it likes."""

    class Pops(Model):
        def training_step(self, batch: Any) -> Any:
            batch.pop("labels")
            return self.layers(batch.pop("input_ids")).mean()

    assert [counts(r)[1] for r in fit(tmp_path, Pops())] == [sum(ACTIVE[:2]), sum(ACTIVE[2:])]


def test_a_step_that_fetches_is_counted(tmp_path: Path) -> None:
    """A training step that takes the iterator is counted by what it fetched."""

    class Fetches(Model):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.layers(batch["input_ids"]).mean()

    assert [counts(r)[1] for r in fit(tmp_path, Fetches())] == [sum(ACTIVE[:2]), sum(ACTIVE[2:])]


def test_a_batch_that_is_skipped_is_not_counted(tmp_path: Path) -> None:
    """A hook that ends the epoch before a batch leaves that batch out."""

    class Skips(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    assert sum(counts(r)[0] for r in fit(tmp_path, Skips())) == sum(RAW[:3])


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": 0, "attention_mask": 1, "labels": 2},
        lambda batch: dict(zip(("input_ids", "attention_mask", "labels"), batch, strict=True)),
    ],
)
def test_batches_without_names(tmp_path: Path, fields: Any) -> None:
    """Tuples are counted by position, or by a function of the batch."""

    class Tuples(Model):
        def training_step(self, batch: Any) -> Any:
            return self.layers(batch[0]).mean()

    data = loader(lambda documents: tuple(collate(documents).values()))
    found = fit(tmp_path, Tuples(), callbacks=[TokrateCallback(fields=fields)], data=data)
    assert counts(found[0]) == (sum(RAW[:2]), sum(ACTIVE[:2]), sum(PADDED[:2]))


def test_lightnings_own_monitor_beside_ours(tmp_path: Path) -> None:
    """Its `items` are our raw tokens where it is told to count slots, and include padding."""
    monitor = ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch["input_ids"]),
        length_fn=lambda batch: batch["input_ids"].numel(),
        window_size=2,
    )
    meter = ThroughputMeter(warmup_windows=0)
    fit(tmp_path, callbacks=[monitor, TokrateCallback(meter)], log_every_n_steps=1)
    entries = [line["metrics"] for line in lines(tmp_path) if "metrics" in line]
    theirs = [metrics["train/lengths"] for metrics in entries if "train/lengths" in metrics]
    assert theirs == [r["total_raw_tokens"] for r in records(tmp_path)]
    assert theirs == [sum(RAW[:n]) for n in (1, 2, 3, 4)]
    rates = [metrics for metrics in entries if "train/device_items_per_sec" in metrics]
    assert len(rates) == 3  # it needs two steps before it has a time to divide by


# --- phases --------------------------------------------------------------------------------------


class Clock:
    """A clock that only the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_training_is_time_of_training(tmp_path: Path) -> None:
    """Sanity check, evaluation and checkpoints are phases; fetching is waited for."""
    clock = Clock()

    class Timed(Model):
        def training_step(self, batch: Any) -> Any:
            clock.now += 1
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> None:
            clock.now += 100

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            clock.now += 1000

    def slow(documents: Any) -> Any:
        clock.now += 0.25
        return collate(documents)

    meter = ThroughputMeter(clock=clock)
    with make_logger(tmp_path) as logger:
        make_trainer(
            logger=logger,
            callbacks=[
                ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2),
                TokrateCallback(meter),
            ],
            enable_checkpointing=True,
            val_check_interval=2,
            num_sanity_val_steps=1,
        ).fit(Timed(), loader(slow), loader())
    first, second = records(tmp_path)
    assert (first["elapsed_s"], second["elapsed_s"]) == (2 * 1.25, 2 * 1.25)
    assert (first["data_wait_s"], second["data_wait_s"]) == (0.5, 0.5)
    assert first["paused_s"] == 100  # the sanity check
    assert second["paused_s"] == 1000 + 4 * 100  # a checkpoint, an evaluation


def test_a_checkpoint_closes_the_window(tmp_path: Path) -> None:
    """A checkpoint between two records has whole totals."""

    class SavesAfterThree(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "three.ckpt")

    counting = TokrateCallback()
    fit(tmp_path, callbacks=[counting, SavesAfterThree()], log_every_n_steps=4)
    saved = torch.load(tmp_path / "three.ckpt", weights_only=True)["callbacks"][counting.state_key]
    assert (saved["step"], saved["total_active_tokens"]) == (3, sum(ACTIVE[:3]))
    assert [r["step"] for r in records(tmp_path)] == [3, 4]


# --- restarts ------------------------------------------------------------------------------------


def test_totals_and_curves_survive_a_restart(tmp_path: Path) -> None:
    """A fit from a checkpoint is the next session of the same run."""
    path = tmp_path / "last.ckpt"
    for epochs in (1, 2):
        with make_logger(tmp_path) as logger:
            trainer = make_trainer(logger=logger, callbacks=[TokrateCallback()], max_epochs=epochs)
            trainer.fit(Model(), loader(), ckpt_path=path if path.exists() else None)
        trainer.save_checkpoint(path)
    assert [r["step"] for r in records(tmp_path)] == [2, 4, 6, 8]
    assert [r["session"] for r in records(tmp_path)] == [1, 1, 2, 2]
    assert records(tmp_path)[-1]["total_active_tokens"] == 2 * sum(ACTIVE)
    sessions = [line for line in lines(tmp_path) if line["kind"] == "run"]
    assert [session["resume_step"] for session in sessions] == [None, 4]


def test_steps_are_right_without_a_state(tmp_path: Path) -> None:
    """A checkpoint made without the callback does not put all its steps into one window."""
    plain = make_trainer()
    plain.fit(Model(), loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with make_logger(tmp_path) as logger:
        trainer = make_trainer(logger=logger, callbacks=[TokrateCallback()], max_epochs=2)
        trainer.fit(Model(), loader(), ckpt_path=tmp_path / "plain.ckpt")
    found = [(r["step"], r["steps"], r["session"]) for r in records(tmp_path)]
    assert found == [(6, 2, 1), (8, 2, 1)]


def test_a_search_for_the_learning_rate_is_survived(tmp_path: Path) -> None:
    """The tuner trains, and goes back to where it was; records of the fit are right after it."""
    with make_logger(tmp_path) as logger:
        trainer = make_trainer(
            logger=logger, callbacks=[TokrateCallback()], default_root_dir=tmp_path
        )
        model = Model()
        Tuner(trainer).lr_find(model, loader(), num_training=3)
        trainer.fit(model, loader())
    assert [counts(r)[1] for r in records(tmp_path)] == [sum(ACTIVE[:2]), sum(ACTIVE[2:])]


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_batch_without_labels_does_not_end_training(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    """What is missing, and how to say where it is, is said once; training goes on."""

    def unlabelled(documents: Any) -> Any:
        return {"input_ids": collate(documents)["input_ids"]}

    found = fit(tmp_path, data=loader(unlabelled))
    assert [r["raw_tps"] for r in found] == [None, None]
    assert said().count("expected labels or loss_mask") == 1
    assert "with the keys input_ids" in said()


def test_a_batch_of_another_kind_does_not_end_training(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    """A plain tensor is named as what it is."""

    class Plain(Model):
        def training_step(self, batch: Any) -> Any:
            return self.layers(batch).mean()

    found = fit(tmp_path, Plain(), data=loader(lambda documents: collate(documents)["input_ids"]))
    assert found[-1]["raw_tps"] is None
    assert "a Tensor (without parts" in said()


def test_data_without_masks_leaves_the_fractions_out(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    """Nothing is guessed where nothing tells padding."""

    def unmasked(documents: Any) -> Any:
        batch = collate(documents)
        del batch["attention_mask"]
        return batch

    first, _ = fit(tmp_path, data=loader(unmasked))
    assert (first["padded_frac"], first["padded_tokens"]) == (None, None)
    assert first["active_tokens"] == sum(ACTIVE[:2])
    assert "nothing tells padding from context" in said()


def test_a_model_that_is_watched_already_is_counted_once(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    """Two integrations at once: the first one counts, and the second one says so."""
    model, meter = Model(), ThroughputMeter(strict=False)
    with watch_model(model.layers, meter, fields={"input_ids": "input"}):
        assert fit(tmp_path, model) == []
    assert "the Lightning callback was asked to count" in said()


def test_a_failed_fit_is_told(tmp_path: Path) -> None:
    """An exception ends the run as failed, and the callback can count another fit."""

    class Fails(Model):
        def training_step(self, batch: Any) -> Any:
            raise RuntimeError("no")

    counting = TokrateCallback()
    logger = make_logger(tmp_path)
    model = Fails()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="no"):
        make_trainer(logger=logger, callbacks=[counting]).fit(model, loader())
    # Behind the end of the logger Lightning puts back the handler that it found: ours, which then
    # does no more than what it stands before.
    signal.signal(signal.SIGTERM, handler)
    assert lines(tmp_path)[-1]["outcome"] == "failed"
    with logger:
        make_trainer(logger=logger, callbacks=[counting]).fit(Model(), loader())
    assert [r["step"] for r in records(tmp_path)] == [2, 4]
    assert lines(tmp_path)[-1]["outcome"] == "finished"


def test_mistakes_are_found_before_training(tmp_path: Path) -> None:
    """A wrong option, backend or field is an error when the object is made."""
    with pytest.raises(ConfigError, match="unexpected keyword argument 'metric'"):
        make_logger(tmp_path, metric="all")
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        TokrateLogger("tensorbord", run=RunInfo("run"))
    with pytest.raises(ConfigError, match="fields= names label"):
        TokrateCallback(fields={"label": 1})
    with pytest.raises(ConfigError, match=r"trainer\.fit makes it"):
        _ = TokrateCallback().meter
    assert not list(tmp_path.iterdir())


def test_an_unknown_version_is_said(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    """A Lightning that was never run with this callback is named, with those that were."""
    monkeypatch.setattr(integrations, "version", lambda package: "1.9.5")
    monkeypatch.setattr(integrations, "_said", set())
    integrations.check_version("lightning")
    assert "lightning 1.9.5 is not known to work: tokrate was tested with lightning 2.6" in said()


# --- other loggers, Fabric, several processes ----------------------------------------------------


def test_other_loggers_get_the_numbers(tmp_path: Path) -> None:
    """Without a `TokrateLogger`, the trainer's own logger has the metrics of each record."""
    logger = CSVLogger(tmp_path, name="csv", version=0)
    make_trainer(logger=logger, callbacks=[TokrateCallback()]).fit(Model(), loader())
    head, *rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    place = head.split(",").index("throughput/total_active_tokens")
    totals = [row.split(",")[place] for row in rows if row.split(",")[place]]
    assert [float(total) for total in totals] == [sum(ACTIVE[:2]), sum(ACTIVE)]


def run_example(name: str, *arguments: str) -> str:
    """What the example prints, run as a user runs it."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    variables = {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for key in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "PL_GLOBAL_SEED"):
        with suppress(KeyError):
            del os.environ[key]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def expected(devices: int) -> tuple[int, int]:
    """Raw and active tokens of one epoch of the examples' documents, counted here."""
    documents = runpy.run_path(str(EXAMPLES / "lightning_fit.py"))["make_documents"]()
    lengths = [len(document) for document in documents]
    starts = range(0, len(lengths), 4 * devices)
    widths = [
        max(lengths[start + rank :: devices][:4]) for start in starts for rank in range(devices)
    ]
    return 4 * sum(widths), sum(lengths) - len(lengths)


def test_two_processes_make_one_record(tmp_path: Path) -> None:
    """DDP: each rank counts its share, one journal has the tokens of both."""
    run_example("lightning_fit.py", str(tmp_path), "2", "2")
    raw, active = expected(devices=1)  # of the whole epoch; shuffled by the sampler when many
    last = records(tmp_path, "lightning")[-1]
    assert (last["devices"], last["step"], last["session"]) == (2, 8, 1)
    assert last["total_active_tokens"] == 2 * active
    assert last["total_raw_tokens"] != 2 * raw
    assert last["rank_imbalance"] > 1


def test_the_example_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start of the example is the next session of the same run."""
    example = runpy.run_path(str(EXAMPLES / "lightning_fit.py"))
    for epochs in ("1", "2"):
        example["main"](str(tmp_path), "1", epochs)
    raw, active = expected(devices=1)
    last = records(tmp_path, "lightning")[-1]
    assert (last["step"], last["session"]) == (16, 2)
    assert (last["total_raw_tokens"], last["total_active_tokens"]) == (2 * raw, 2 * active)


def test_a_loop_under_fabric_on_two_processes(tmp_path: Path) -> None:
    """The meter and the logger of the example have the tokens of both processes."""
    run_example("fabric_loop.py", str(tmp_path), "2")
    last = records(tmp_path, "fabric")[-1]
    assert last["devices"] == 2
    assert last["total_active_tokens"] == expected(devices=2)[1]
    entries = [line for line in lines(tmp_path, "fabric") if line["kind"] == "entry"]
    assert sum("train/loss" in entry["metrics"] for entry in entries) == 2
    assert lines(tmp_path, "fabric")[-1]["outcome"] == "finished"

"""Accelerate with the tracker: a hand count, accumulation, two processes, restarts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, register_tracker_class
from torch.utils.data import DataLoader
from transformers import default_data_collator

from integrations.hugging import Rows, journal, records, run_example, tiny_llama, two_lines
from launching import TESTS, torchrun
from tokrate import RunInfo, ThroughputMeter, TokenCounts, watch_model
from tokrate.errors import ConfigError, UnknownBackendError
from tokrate.integrations.accelerate import TokrateTracker

pytestmark = [
    # Accelerate on what it itself, and torch, do.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def _states_of_their_own() -> Iterator[None]:
    """Accelerate keeps its state for the process; each test begins without."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not PartialState._shared_state


def loader(rows: int = 24) -> Any:
    """Batches of two rows, in order."""
    return DataLoader(Rows(rows), batch_size=2, collate_fn=default_data_collator)


def train(
    accelerator: Accelerator, tracker: TokrateTracker, batches: Any, *, every: int = 3
) -> TokenCounts:
    """A plain Accelerate loop; returns what this process was fed, counted from lists."""
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    tracker.watch(model)
    step, fed = tracker.meter.last_step, TokenCounts(0, 0, 0)
    for batch in tracker.meter.watch(batches):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        fed += by_hand(batch)
        if accelerator.sync_gradients:
            step += 1
            accelerator.log({"loss": loss}, step=step)
            if step % every == 0:
                tracker.record(step)
    return fed


def by_hand(batch: Any) -> TokenCounts:
    """The counts of a batch, from lists."""
    labels, mask = batch["labels"].tolist(), batch["attention_mask"].tolist()
    active = sum(label != -100 for row in labels for label in row[1:])
    return TokenCounts(sum(map(len, labels)), active, sum(row.count(0) for row in mask))


def found(folder: Path) -> TokenCounts:
    """The sum over the records in the folder."""
    total = TokenCounts(0, 0, 0)
    for record in records(folder):
        total += TokenCounts(*(record[f"{what}_tokens"] for what in ("raw", "active", "padded")))
    return total


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_record_is_a_hand_count(tmp_path: Path, accumulate: int) -> None:
    """Every micro-batch counts once, and steps are the optimizer's."""
    tracker = TokrateTracker("sft", dir=tmp_path)
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=accumulate)
    accelerator.init_trackers("sft", config={"lr": 0.1})
    fed = train(accelerator, tracker, loader())
    accelerator.end_training()
    assert found(tmp_path) == fed
    real = [3 + index % 5 for index in range(24)]
    assert fed == TokenCounts(24 * 8, sum(real) - 2 * 24, 24 * 8 - sum(real))
    assert [record["step"] for record in records(tmp_path)] == list(
        range(3, 12 // accumulate + 1, 3)
    )
    lines = journal(tmp_path)
    assert lines[0]["config"] == {"lr": 0.1}
    assert lines[-1]["outcome"] == "finished"
    losses = [line for line in lines if "loss" in line.get("metrics", {})]
    assert len(losses) == 12 // accumulate


def test_the_example_counts_what_it_counts_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record and its own count of the same documents are one."""
    run_example("accelerate_loop.py", str(tmp_path))
    by_hand, counted = two_lines(capsys.readouterr().out)
    assert by_hand == counted == [found(tmp_path).active]


def test_two_processes_sum(tmp_path: Path) -> None:
    """DDP on two processes: the record is the sum of what both were fed, repeated rows included."""
    said = torchrun(TESTS / "integrations" / "accelerated_world.py", str(tmp_path), ranks=2)
    fed = [
        TokenCounts(*map(int, match)) for match in re.findall(r"fed (\d+) (\d+) (\d+) end", said)
    ]
    assert found(tmp_path) == fed[0] + fed[1]
    # 22 rows make 11 batches; accelerate repeats two rows to give both processes 6.
    assert found(tmp_path).raw == 24 * 8
    assert {record["devices"] for record in records(tmp_path)} == {2}


def test_totals_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """The meter is registered for checkpointing like anything that has a state."""
    fed = []
    for session in (1, 2):
        tracker = TokrateTracker(RunInfo("sft", id="sft-1"), dir=tmp_path / "runs")
        accelerator = Accelerator(cpu=True, log_with=tracker)
        accelerator.init_trackers("sft")
        accelerator.register_for_checkpointing(tracker.meter)
        if session == 2:
            accelerator.load_state(str(tmp_path / "saved"))
        fed.append(train(accelerator, tracker, loader(12)))
        accelerator.save_state(str(tmp_path / "saved"))
        accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
    last = records(tmp_path)[-1]
    assert (last["session"], last["step"]) == (2, 12)
    assert last["total_active_tokens"] == fed[0].active + fed[1].active


def test_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered once, the tracker is found by its name and gets its options from init_kwargs."""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tokrate", None)
    del LOGGER_TYPE_TO_CLASS["tokrate"]
    register_tracker_class(TokrateTracker)
    accelerator = Accelerator(cpu=True, log_with="tokrate")
    options = {"logger": "tensorboard", "dir": tmp_path}
    accelerator.init_trackers("named", init_kwargs={"tokrate": options})
    tracker = accelerator.get_tracker("tokrate")
    train(accelerator, tracker, loader())
    assert accelerator.get_tracker("tokrate", unwrap=True) is tracker.tracker
    accelerator.end_training()
    assert len(records(tmp_path / "named")) == 4
    assert list((tmp_path / "named").glob("events.*"))


def test_evaluation_is_a_phase(tmp_path: Path) -> None:
    """What is evaluated, in a phase of the meter, is neither tokens nor time."""
    tracker = TokrateTracker("sft", dir=tmp_path)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("sft")  # else end_training does not know the tracker
    model = accelerator.prepare(tiny_llama())
    tracker.watch(model)
    batch = next(iter(loader()))
    with tracker.meter.phase("eval"):
        model.eval()
        model(**batch)
    model.train()
    accelerator.backward(model(**batch).loss)
    assert tracker.record(1).raw_tokens == 16
    accelerator.end_training()


def test_numbers_without_a_step_go_to_the_last_one(tmp_path: Path) -> None:
    """Accelerate lets scripts leave out the step, and pass options that we do not have."""
    tracker = TokrateTracker("sft", dir=tmp_path)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("sft")
    accelerator.log({"loss": 1.0}, step=4)
    accelerator.log({"accuracy": 0.5}, log_kwargs={"tokrate": {"commit": False}})
    accelerator.end_training()
    entries = [line for line in journal(tmp_path) if line["kind"] == "entry"]
    assert [(line["step"], line["metrics"]) for line in entries] == [
        (4, {"loss": 1.0}),
        (4, {"accuracy": 0.5}),
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"logger": "tensorbord"}, UnknownBackendError, "Did you mean 'tensorboard'"),
        ({"meter_options": {"warmup": 1}}, ConfigError, "unexpected keyword argument 'warmup'"),
    ],
)
def test_mistakes_are_said_when_the_tracker_is_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Before Accelerate has done anything."""
    with pytest.raises(error, match=message):
        TokrateTracker("sft", **options)


def test_a_model_that_is_watched_twice_counts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever came first goes on counting; the tracker says so."""
    tracker = TokrateTracker("sft", dir=tmp_path)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("sft")  # else end_training does not know the tracker
    model = accelerator.prepare(tiny_llama())
    meter = ThroughputMeter()
    with watch_model(model, meter), caplog.at_level(logging.WARNING, "tokrate"):
        assert not tracker.watch(model).active
        model(**next(iter(loader())))
    accelerator.end_training()
    assert meter.record(1).raw_tokens == 16
    assert "TokrateTracker was asked to count" in caplog.text


def test_a_late_configuration_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run's facts are written when it is opened, and not changed later."""
    tracker = TokrateTracker("sft", dir=tmp_path)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    tracker.watch(accelerator.prepare(tiny_llama()))
    with caplog.at_level(logging.WARNING, "tokrate"):
        accelerator.init_trackers("sft", config={"lr": 1})
    accelerator.end_training()
    assert "the configuration came when the run was open already" in caplog.text


def test_the_version_is_known() -> None:
    """This test ran with the version that is said to work."""
    from tokrate.integrations import KNOWN

    assert accelerate.__version__.startswith(KNOWN["accelerate"][0])

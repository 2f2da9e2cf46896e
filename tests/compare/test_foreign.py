"""Runs that other frameworks wrote: what is known is mapped, what is unknown is said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from compare.making import noisy, records, write_journal
from tokrate.compare import compare_runs, read_runs
from tokrate.compare.keys import understand
from tokrate.compare.series import Series
from tokrate.compare.sources import read_source


def write_scalars(folder: Path, rows: Iterable[Mapping[str, float]], every: int = 10) -> Path:
    """Scalars as torch's SummaryWriter keeps them: an event for each, ten seconds a row."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for number, row in enumerate(rows, start=1):
        for tag, number_of in row.items():
            value = Summary.Value(tag=tag, simple_value=number_of)
            at_s, step = 1.7e9 + 10 * number, every * number
            writer.add_event(Event(wall_time=at_s, step=step, summary=Summary(value=[value])))
    writer.close()
    return folder


def read_one(folder: Path) -> Series:
    """The one run below a folder."""
    (found,) = read_source(f"tensorboard:{folder}")
    return found


def test_torchtune(tmp_path: Path) -> None:
    """Active tokens per second and device; the rest is unknown, and said."""
    rows = [{"loss": 1.0, "lr": 0.1, "tokens_per_second_per_gpu": 100.0 + i} for i in range(6)]
    found = read_one(write_scalars(tmp_path / "tune", rows))
    assert found.facts.written_by == "torchtune"
    assert found.facts.name == "tune"
    np.testing.assert_allclose(found.columns["active_tps_per_device"], 100 + np.arange(6))
    assert not found.knows("raw_tps")
    assert not found.knows("padded_frac")
    assert np.nanmedian(found.columns["elapsed_s"]) == 10.0
    assert "padding, masking and the number of devices are unknown" in found.facts.notes[0]


def test_torchtitan(tmp_path: Path) -> None:
    """Slots per second and device, percent as shares, seconds from those of a step."""
    row = {"throughput(tps)": 5000.0, "mfu(%)": 40.0, "time_metrics/end_to_end(s)": 0.5}
    row |= {"time_metrics/data_loading(%)": 2.0, "validation_metrics/throughput(tps)": 9.0}
    found = read_one(write_scalars(tmp_path / "titan", [row] * 4))
    assert found.facts.written_by == "torchtitan"
    assert found.columns["raw_tps_per_device"].tolist() == [5000.0] * 4
    assert found.columns["mfu"][1] == pytest.approx(0.4)
    assert found.columns["data_wait_frac"][1] == pytest.approx(0.02)
    assert found.columns["elapsed_s"][1:].tolist() == [5.0] * 3


def test_composer(tmp_path: Path) -> None:
    """Slots per second, over all devices and per device, from which their number follows."""
    row = {"throughput/tokens_per_sec": 800.0, "throughput/device/tokens_per_sec": 100.0}
    write_scalars(tmp_path / "composer", [row] * 5)
    (run,) = compare_runs(read_runs([f"tensorboard:{tmp_path}"])).runs
    assert (run.written_by, run.raw_tps, run.devices) == ("composer", 800.0, 8)
    assert run.active_tps is None


def test_huggingface(tmp_path: Path) -> None:
    """The rate of each window is what the running total grew by; the mean so far is not used."""
    rows = [
        {"train/num_input_tokens_seen": 1000.0 * i, "train/train_tokens_per_second": 1.0}
        for i in range(1, 6)
    ]
    found = read_one(write_scalars(tmp_path / "hf", rows))
    assert found.facts.written_by == "huggingface"
    assert found.columns["raw_tps"][1:].tolist() == [100.0] * 4
    assert any("pauses" in note for note in found.facts.notes)


def test_an_old_run_beside_a_new_one(tmp_path: Path) -> None:
    """The best number that both have is compared; no factor is made up; it is said."""
    write_journal(tmp_path / "new", records(noisy(20, devices=2)))
    rows = [{"tokens_per_second_per_gpu": 100.0 + i % 2} for i in range(20)]
    write_scalars(tmp_path / "old", rows)
    sources = [str(tmp_path / "new"), f"tensorboard:{tmp_path / 'old'}"]
    found = compare_runs(read_runs(sources))
    versus = found.runs[1].versus
    assert versus is not None
    assert (versus.of, versus.factors) == ("active_tps_per_device", ())
    assert versus.ratio == pytest.approx(100.5 / 200, rel=0.02)
    assert any("active_tps_per_device" in doubt.text for doubt in found.doubts)
    assert any("torchtune writes" in doubt.text for doubt in found.doubts)


def test_our_own_names_come_first() -> None:
    """A run with aliases is read by its own names, behind any prefix."""
    keys = ["tokens_per_second_per_gpu", "speed/active_tps", "speed/raw_tps"]
    found = understand(keys)
    assert found is not None
    assert found.written_by == "tokrate"
    assert set(found.keys) == {"speed/active_tps", "speed/raw_tps"}


def test_names_that_say_nothing_are_not_guessed() -> None:
    """Neither a loss nor a validation speed is a training speed."""
    assert understand(["loss", "lr", "mfu(%)"]) is None
    assert understand(["validation_metrics/throughput(tps)"]) is None


def test_scalars_of_the_newer_kind_are_read(tmp_path: Path) -> None:
    """Scalars that are kept as tensors, as TensorFlow 2 writes them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "new-style"))
    for step in range(1, 5):
        tensor = TensorProto(dtype=1, float_val=[100.0 * step])
        value = Summary.Value(tag="tokens_per_second_per_gpu", tensor=tensor)
        writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=[value])))
    writer.close()
    found = read_one(tmp_path)
    assert found.columns["active_tps_per_device"].tolist() == [100, 200, 300, 400]

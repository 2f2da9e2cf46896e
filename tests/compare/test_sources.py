"""Reading runs back: the same from every source, and clear words where there is nothing to read."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.readers import accumulate, wandb_rows
from compare.conftest import sources_of
from compare.making import START_MS, Window, noisy, records, write_journal
from tokrate.compare.progress import silent
from tokrate.compare.series import COLUMNS, Series
from tokrate.compare.sources import _mlflow, _wandb, read_source
from tokrate.compare.sources._events import parse, read_events
from tokrate.errors import CompareError, TokrateError


def by_name(found: Sequence[Series]) -> dict[str, Series]:
    """The runs of a source by their names."""
    return {series.facts.name: series for series in found}


# --- the same from every source -------------------------------------------------------------------


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow", "wandb"])
def test_every_source_gives_the_same_series(logged: Path, tracker: str) -> None:
    """What a tracker has is, to the last bit, what the journal has; resumed runs included."""
    sources = sources_of(logged)
    journals, read = (
        by_name(read_source(sources["journal"])),
        by_name(read_source(sources[tracker])),
    )
    assert set(read) == {"padded", "packed", "quick", "resumed"}
    for name, ours in journals.items():
        theirs = read[name]
        assert theirs.facts.run_id == ours.facts.run_id
        np.testing.assert_array_equal(theirs.step, ours.step, err_msg=name)
        np.testing.assert_array_equal(theirs.first, ours.first, err_msg=name)
        for column in COLUMNS:
            np.testing.assert_array_equal(
                theirs.columns[column], ours.columns[column], err_msg=name
            )


def test_a_resumed_run_has_what_counts(logged: Path) -> None:
    """Windows behind the checkpoint are void; the first window of each session is known."""
    resumed = by_name(read_source(str(logged)))["resumed"]
    assert resumed.step.tolist() == [*range(1, 16, 2), *range(18, 41, 2)]
    assert resumed.step[resumed.first].tolist() == [1, 18]
    assert resumed.sessions == 2


def test_event_files_are_read_as_tensorboard_reads_them(logged: Path) -> None:
    """Our own reader and TensorBoard's give the same points."""
    for name in ("padded", "resumed"):
        events = accumulate(logged / name)
        ours = by_name(read_source(f"tensorboard:{logged}"))[name]
        theirs = {e.step: e.value for e in events.Scalars("throughput/active_tps")}
        assert dict(zip(ours.step.tolist(), ours.columns["active_tps"], strict=True)) == theirs


def test_offline_files_are_read_as_wandb_writes_them(logged: Path) -> None:
    """Our own reader and W&B's protobufs give the same rows."""
    theirs = [row for row in wandb_rows(logged / "packed") if "throughput/raw_tps" in row]
    ours = by_name(read_source(f"wandb:{logged}"))["packed"]
    assert ours.step.tolist() == [row["throughput/step"] for row in theirs]
    values = np.array([row["throughput/raw_tps"] for row in theirs], np.float32)
    np.testing.assert_array_equal(ours.columns["raw_tps"], values)


def test_mlflow_store_and_sql_give_the_same(logged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is read through MLflow's store; on one file both ways agree."""
    uri = f"sqlite:///{logged}/mlflow.db"
    by_sql = read_source(f"mlflow:{uri}#all")
    monkeypatch.setattr(_mlflow, "sqlite_path", lambda uri: None)
    by_store = read_source(f"mlflow:{uri}#all")
    assert [s.facts.run_id for s in by_store] == [s.facts.run_id for s in by_sql]
    for ours, theirs in zip(by_sql, by_store, strict=True):
        np.testing.assert_array_equal(ours.step, theirs.step)
        np.testing.assert_array_equal(ours.columns["active_tps"], theirs.columns["active_tps"])


def test_outcomes_are_read(logged: Path) -> None:
    """Journal, MLflow and W&B know how a run ended; event files do not."""
    for kind, source in sources_of(logged).items():
        outcomes = {series.facts.outcome for series in read_source(source)}
        assert outcomes == ({None} if kind == "tensorboard" else {"finished"}), kind


# --- W&B's server, as far as that goes without one ------------------------------------------------


def test_rows_of_the_api_become_a_series() -> None:
    """What `wandb.Api` gives, as its documentation says; it was not run against a server."""
    rows = [
        {"_step": i, "_timestamp": START_MS / 1000 + i, "throughput/step": 10 * i, "note": "text"}
        | {"throughput/active_tps": 400.0, "throughput/raw_tps": 1000.0}
        | {"throughput/elapsed_s": 1.0, "throughput/total_active_tokens": 400 * (i + 1)}
        for i in range(5)
    ]
    run = SimpleNamespace(name="a", id="x1", state="crashed", scan_history=lambda: iter(rows))
    (found,) = _wandb.runs_of_api(SimpleNamespace(runs=lambda path: [run]), "me/project", silent)
    series = _wandb._series(found)
    assert series is not None
    assert series.step.tolist() == [0, 10, 20, 30, 40]
    assert (series.facts.run_id, series.facts.outcome) == ("x1", "killed")


# --- damaged files --------------------------------------------------------------------------------


def test_a_torn_journal_loses_its_last_line(tmp_path: Path) -> None:
    """A line that is being written just now is left for later."""
    folder = write_journal(tmp_path / "a", records([Window()] * 5), outcome=None)
    path = folder / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    (series,) = read_source(str(folder))
    assert len(series) == 4
    assert series.facts.notes == ()
    assert series.facts.outcome == "open"


def test_a_damaged_line_costs_one_line(tmp_path: Path) -> None:
    """What cannot be read is left out and said; NaN, which JSON does not have, can be read."""
    folder = write_journal(tmp_path / "a", records([Window()] * 5))
    path = folder / "journal.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:50]
    lines[3] = lines[3].replace('"mfu":null', '"mfu":NaN')
    path.write_text("\n".join([*lines, "no json at all", ""]))
    (series,) = read_source(str(folder))
    assert series.step.tolist() == [1, 3, 4, 5]
    assert "1 damaged lines" in series.facts.notes[0]


def test_a_torn_event_file_is_read_up_to_there(logged: Path, tmp_path: Path) -> None:
    """Every length that a file can be cut to is readable."""
    (source,) = (logged / "padded").glob("*tfevents*")
    data = source.read_bytes()
    torn = tmp_path / "events.out.tfevents.torn"
    for size in (0, 5, 12, 100, len(data) // 2, len(data) - 1):
        torn.write_bytes(data[:size])
        rows = sum(len(table.step) for table in read_events(torn).tables)
        assert rows <= len(records([Window()] * 31)) * 2 + 8


def test_a_damaged_event_is_left_out() -> None:
    """An event that is none raises nothing."""
    assert parse(b"\xff\xff\xff") is None
    assert parse(struct.pack("<Bd", 9, 1.5)) is not None


def test_a_damaged_wandb_record_is_left_out(logged: Path, tmp_path: Path) -> None:
    """Rows around a damaged one are read."""
    source = max((logged / "quick").glob("wandb/*/*.wandb"), key=lambda p: p.stat().st_size)
    folder = tmp_path / source.parent.name
    folder.mkdir()
    data = bytearray(source.read_bytes())
    middle = data.index(b"throughput/active_tps", len(data) // 3)
    data[middle - 2] ^= 0xFF
    (folder / source.name).write_bytes(data)
    (series,) = read_source(f"wandb:{tmp_path}")
    assert 25 <= len(series) <= 31


# --- nothing to read ------------------------------------------------------------------------------


def refused(source: str) -> str:
    """What is said of a source that cannot be read."""
    with pytest.raises(TokrateError) as caught:
        read_source(source)
    return str(caught.value)


def test_folders_without_runs_are_told(logged: Path, tmp_path: Path) -> None:
    """Each says what was looked for; event files that lie there are named."""
    assert "no such folder" in refused(str(tmp_path / "none"))
    assert "no journal.jsonl in it or below" in refused(str(tmp_path))
    assert "no event files" in refused(f"tensorboard:{tmp_path}")
    assert "no .wandb file" in refused(f"wandb:{tmp_path}")
    assert "no such folder, and no entity/project" in refused(f"wandb:{tmp_path}/none/a/b")
    assert "is no kind of source" in refused("tensorbord:runs")
    (source,) = (logged / "padded").glob("*tfevents*")
    shutil.copy(source, tmp_path)
    assert f"read it as tensorboard:{tmp_path}" in refused(str(tmp_path))


def test_mlflow_stores_that_are_not_there_are_told(logged: Path, tmp_path: Path) -> None:
    """A missing experiment is told with those that are there, and no file is made."""
    missing = tmp_path / "mlflow.db"
    assert f"there is no file {missing}" in refused(f"mlflow:sqlite:///{missing}")
    assert not missing.exists()
    said = refused(f"mlflow:sqlite:///{logged}/mlflow.db#alpaca")
    assert "no experiment 'alpaca'" in said
    assert "all" in said
    other = tmp_path / "other.db"
    other.write_text("this is no database, and long enough to be taken for one")
    assert "cannot be read as an MLflow store" in refused(f"mlflow:{other}")


def test_passwords_of_a_server_are_not_told() -> None:
    """A server that nobody answers on: the address is shown without its password."""
    said = refused("mlflow:http://me:s3cret@127.0.0.1:9#alpaca")
    assert "cannot be read" in said
    assert "s3cret" not in said


def test_files_without_our_names_are_told(tmp_path: Path) -> None:
    """Event files of something else: what was found is named."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary as Proto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    value = Proto.Value(tag="loss", simple_value=1.0)
    writer.add_event(Event(wall_time=1.0, step=1, summary=Proto(value=[value])))
    writer.close()
    assert "no run with names that we know (found loss)" in refused(f"tensorboard:{tmp_path}")


def test_an_empty_journal_is_told(tmp_path: Path) -> None:
    """A run without a record cannot be compared; beside others it is only listed."""
    write_journal(tmp_path / "a", [])
    assert "1 run (a) without a single record" in refused(str(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "journal.jsonl").touch()
    assert "2 runs" in refused(str(tmp_path))
    write_journal(tmp_path / "c", records(noisy(5)))
    assert len(read_source(str(tmp_path))) == 3


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link that leads back up makes no endless search."""
    write_journal(tmp_path / "runs" / "a", records(noisy(5)))
    (tmp_path / "runs" / "again").symlink_to(tmp_path)
    assert len(read_source(str(tmp_path))) == 1


def test_progress_is_told(tmp_path: Path) -> None:
    """Whoever shows a bar hears of the search and of each file."""
    write_journal(tmp_path / "a", records(noisy(5)))
    told: list[Any] = []
    read_source(str(tmp_path), lambda *words: told.append(words))
    assert any("files looked at" in what for what, *_ in told)
    assert any("reading" in what and total for what, _, total in told)


def test_errors_of_ours_are_one_kind() -> None:
    """Who calls it from Python catches one error."""
    with pytest.raises(CompareError):
        read_source("nowhere-at-all")

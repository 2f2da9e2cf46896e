"""The journal and the run's folder: the truth about a run, on disk."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from driving import make_record
from tokrate import RunInfo
from tokrate.errors import ConfigError, JournalError, RunFolderError
from tokrate.folder import check_run, open_folder
from tokrate.journal import Journal, JournalReader, Place, read_lines
from tokrate.run import Entry


def entry(step: int = 1, **metrics: float) -> Entry:
    """An entry of one metric."""
    return Entry(time_unix_ms=1, step=step, metrics=metrics or {"loss": 0.5})


def test_one_line_for_each_entry(tmp_path: Path) -> None:
    """Each entry is one JSON line, there before `append` returns, readable by anybody."""
    journal = Journal(tmp_path)
    journal.append_entry(entry(1, loss=math.nan, gain=math.inf))
    journal.append_entry(
        Entry(time_unix_ms=2, step=2, metrics={"a": 1}, record=make_record(step=2))
    )
    first, second = map(json.loads, journal.path.read_text().splitlines())
    assert first["kind"] == "entry"
    assert math.isnan(first["metrics"]["loss"])
    assert first["metrics"]["gain"] == math.inf
    assert "record" not in first
    assert second["record"] == make_record(step=2).to_dict()
    journal.close()
    journal.close()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 10**30])
@pytest.mark.parametrize("field", ["raw_tps", "elapsed_s", "mfu", "rank_imbalance", "paused_s"])
def test_odd_numbers_of_a_record_are_kept(tmp_path: Path, field: str, odd: float) -> None:
    """What the fast encoder would turn into null, or refuse, is written all the same."""
    journal = Journal(tmp_path)
    record = make_record(**{field: odd})
    journal.append_entry(Entry(time_unix_ms=1, step=1, metrics={"a": 1}, record=record))
    (line,) = read_lines(journal.path)
    assert repr(line["record"][field]) == repr(odd)
    assert journal.place == Place(journal.path.stat().st_size, 1)


def test_both_encoders_write_the_same(tmp_path: Path) -> None:
    """The fast way writes byte for byte what Python's own `json` writes."""
    journal = Journal(tmp_path)
    fields = {"kind": "entry", "time_unix_ms": 1, "step": 1, "metrics": {"größe": 1.5, "n": 2**53}}
    journal.append_entry(
        Entry(time_unix_ms=1, step=1, metrics=fields["metrics"], record=make_record())
    )
    journal.append(fields | {"record": make_record().to_dict()})
    first, second = journal.path.read_bytes().splitlines()
    assert first == second


def test_reader_follows_the_writer(tmp_path: Path) -> None:
    """A reader sees entries as they come, in portions, and none twice."""
    journal = Journal(tmp_path)
    journal.append({"kind": "run", "id": "x"})
    reader = JournalReader(journal.path)
    assert reader.read(10).entries == []
    for step in range(5):
        journal.append_entry(entry(step))
    first = reader.read(3)
    assert [e.step for e in first.entries] == [0, 1, 2]
    reader.place = first.place
    second = reader.read(10)
    assert [e.step for e in second.entries] == [3, 4]
    assert second.place == journal.place == Place(journal.path.stat().st_size, 5)


def test_half_a_line_waits(tmp_path: Path) -> None:
    """A line that is being written is not read by halves."""
    journal = Journal(tmp_path)
    journal.append_entry(entry(1))
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"entry","time_unix')
    assert len(JournalReader(journal.path).read(10).entries) == 1


def test_torn_last_line_is_cut(tmp_path: Path) -> None:
    """A process that died within a write leaves half a line; the next session cuts it off."""
    journal = Journal(tmp_path)
    journal.append_entry(entry(1))
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"entry","time_unix')
    again = Journal(tmp_path)
    again.append_entry(entry(2))
    assert again.place.entries == 2
    assert [line["step"] for line in read_lines(again.path)] == [1, 2]


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    """Lines of a newer version or of somebody else's do not stop the reader; damage is counted."""
    journal = Journal(tmp_path)
    journal.append({"kind": "tomorrow", "x": 1})
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"entry","step":\n\xff\xfe\n[1]\n{"kind":"entry"}\n')
    journal.append_entry(entry(3))
    batch = JournalReader(journal.path).read(10)
    assert [e.step for e in batch.entries] == [3]
    assert (batch.unreadable, batch.place.entries) == (2, 3)


def test_second_process_is_refused(tmp_path: Path) -> None:
    """One process writes a run: another is refused with the first one's pid."""
    journal = Journal(tmp_path)
    journal.append({"kind": "run", "id": "x", "pid": os.getpid()})
    path = f"pathlib.Path({str(tmp_path)!r})"
    program = f"import pathlib; from tokrate.journal import Journal; Journal({path})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"is being written by process {os.getpid()}" in done.stderr
    with pytest.raises(JournalError, match=str(os.getpid())):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_no_journal_to_read(tmp_path: Path) -> None:
    """A folder that is no run says what to pass."""
    with pytest.raises(JournalError, match=r"holds journal\.jsonl"):
        list(read_lines(tmp_path / "journal.jsonl"))


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/abs", "", ".hidden", "x" * 200, "a\0b", "..", "a."]
)
def test_run_names_stay_in_their_folder(name: str) -> None:
    """A name that leaves the run folder, or cannot be a folder, is refused with a legal one."""
    with pytest.raises(ConfigError, match="cannot name a folder"):
        check_run(RunInfo(name))


@pytest.mark.parametrize("name", ["packed", "run 1", "größe", "a=b,c", "v1.2"])
def test_run_names_that_people_use(name: str) -> None:
    """Names in any script, with spaces, dots and equals signs, are fine."""
    assert check_run(RunInfo(name)).name == name


def test_ids_are_checked_and_made(tmp_path: Path) -> None:
    """A run without id gets a fresh one; a given one is checked like the name."""
    assert check_run(RunInfo("a")).id != check_run(RunInfo("a")).id
    with pytest.raises(ConfigError, match="run id"):
        check_run(RunInfo("a", id="../b"))


def test_same_name_is_another_folder(tmp_path: Path) -> None:
    """Two runs of one name get two folders; the same id comes back to its own."""
    folders = []
    for run_id in ("one", "two", "one", "two"):
        folder, made = open_folder(tmp_path, RunInfo("packed", id=run_id))
        if made:
            journal = Journal(folder)
            journal.append({"kind": "run", "id": run_id})
            journal.close()
        folders.append(folder.name)
    assert folders == ["packed", "packed-2", "packed", "packed-2"]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file in the way is one clear error."""
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunFolderError, match="pass another dir="):
        open_folder(tmp_path / "runs", RunInfo("a", id="b"))


def test_files_have_the_users_umask(tmp_path: Path) -> None:
    """Nothing is world-writable; what others may read is the user's umask's business."""
    before = os.umask(0o027)
    try:
        folder, _ = open_folder(tmp_path / "runs", RunInfo("a", id="b"))
        journal = Journal(folder)
        journal.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o640

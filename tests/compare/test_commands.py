"""`tokrate compare` and `tokrate runs`: what they print, and how they exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compare.making import Window, noisy, records, write_journal
from tokrate import compare_cli
from tokrate.cli import main
from tokrate.compare import comparison


class Done:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def tokrate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Runs a command line as a terminal does, exit code included."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["tokrate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with a run and one that is a tenth slower."""
    folder = tmp_path / "runs"
    write_journal(folder / "base", records([Window(), *noisy(30, 1)]), run_id="1")
    write_journal(folder / "slow", records([Window(), *noisy(30, 2, speed=0.9)]), run_id="2")
    return folder


def test_compare_prints_a_table(tokrate, two: Path) -> None:
    """The table and the sentence; nothing on standard error, nothing written."""
    before = sorted(two.rglob("*"))
    done = tokrate("compare", two)
    assert (done.code, done.err) == (0, "")
    assert "slow has 0.9" in done.out
    assert "the machine works slower" in " ".join(done.out.split())
    assert sorted(two.rglob("*")) == before


def test_forms(tokrate, two: Path) -> None:
    """JSON, CSV and Markdown on standard output."""
    assert json.loads(tokrate("compare", two, "--json").out)["reference"] == "base"
    assert tokrate("compare", two, "--csv").out.startswith("label,")
    assert tokrate("compare", two, "--markdown").out.startswith("| run |")


def test_base_chooses_the_reference(tokrate, two: Path) -> None:
    """By name; an unknown one is told with those that are there."""
    done = tokrate("compare", two, "--base", "slow", "--json")
    assert json.loads(done.out)["reference"] == "slow"
    done = tokrate("compare", two, "--base", "slwo")
    assert done.code == 2
    assert "expected one of base, slow" in done.err


def test_html_is_written_whole(tokrate, two: Path, tmp_path: Path) -> None:
    """Beside the table; a folder that is not there is told before anything is read."""
    page = tmp_path / "page.html"
    assert tokrate("compare", two, "--html", page).code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "page.html"}
    done = tokrate("compare", two, "--html", tmp_path / "none" / "page.html")
    assert done.code == 2
    assert "a folder that exists" in done.err


@pytest.mark.parametrize(("limit", "code"), [("0.95", 1), ("0.85", 0)])
def test_the_gate(tokrate, two: Path, limit: str, code: int) -> None:
    """A tenth slower fails at 0.95 and passes at 0.85; who is too slow is told."""
    done = tokrate("compare", two, "--fail-below", limit)
    assert done.code == code
    assert ("slow is too slow: 0.9" in done.err) == bool(code)


def test_noise_does_not_fail_the_gate(tokrate, tmp_path: Path) -> None:
    """A ratio below the limit whose interval holds 1 fails nobody."""
    loud = [Window(elapsed_s=w.elapsed_s**20) for w in noisy(12, 3)]
    write_journal(tmp_path / "a", records([Window(), *noisy(12, 1)]), run_id="1")
    write_journal(tmp_path / "b", records([Window(), *loud]), run_id="2")
    done = tokrate("compare", tmp_path, "--fail-below", "0.999", "--json")
    versus = json.loads(done.out)["runs"][1]["versus"]
    assert versus["low"] < 1 < versus["high"]
    assert done.code == 0


def test_a_gate_that_cannot_judge_is_an_error(tokrate, two: Path, tmp_path: Path) -> None:
    """One run, or one steady window: silence would be taken for a pass."""
    assert tokrate("compare", two / "base", "--fail-below", "0.9").code == 2
    write_journal(tmp_path / "short", records([Window(), Window()]), run_id="3")
    done = tokrate("compare", two / "base", tmp_path / "short", "--fail-below", "0.9")
    assert done.code == 2
    assert "short cannot be judged" in done.err


def test_errors_are_one_line_and_code_2(tokrate, tmp_path: Path) -> None:
    """No trace, nothing on standard output."""
    done = tokrate("compare", tmp_path / "none")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1


def test_a_source_that_cannot_be_read_is_told(tokrate, two: Path) -> None:
    """A journal without permission; root may read everything, so a folder takes its place."""
    (two / "base" / "journal.jsonl").unlink()
    (two / "base" / "journal.jsonl").symlink_to("/proc/self/mem")
    done = tokrate("compare", two / "base")
    assert done.code == 2
    assert "cannot be read" in done.err


def test_interrupted_has_its_own_code(
    tokrate, two: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C while reading is no failed gate, and leaves no page."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "read_source", stop)
    done = tokrate("compare", two, "--html", tmp_path / "page.html")
    assert done.code == 130
    assert "interrupted" in done.err
    assert not (tmp_path / "page.html").exists()


def test_what_takes_long_shows_a_bar(tokrate, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard error, so that a pipe gets the answer alone."""
    monkeypatch.setattr(compare_cli, "SHOW_AFTER_S", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich is concerned
    done = tokrate("compare", two, "--json")
    assert json.loads(done.out)["reference"] == "base"
    assert done.err.strip()


def test_runs_lists_outcomes(tokrate, two: Path) -> None:
    """One line for each; one that left no word is open."""
    write_journal(two / "open", records([Window(), *noisy(5)]), run_id="3", outcome=None)
    done = tokrate("runs", two)
    assert done.code == 0
    lines = {line.split()[0]: line for line in done.out.splitlines()[2:]}
    assert set(lines) == {"base", "slow", "open"}
    assert " finished " in lines["base"]
    assert " open " in lines["open"]
    found = json.loads(tokrate("runs", two, "--json").out)["runs"]
    assert [run["outcome"] for run in found].count("open") == 1


def completed(words: str, cwd: Path) -> list[str]:
    """What bash would offer for the last of the words."""
    environment = os.environ | {
        "_TOKRATE_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    program = (
        "import sys; sys.argv = ['tokrate']; from tokrate.cli import cli; cli(prog_name='tokrate')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, env=environment, capture_output=True, text=True
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_sources_are_completed(two: Path) -> None:
    """Folders, kinds of sources, and folders behind a kind."""
    assert completed("tokrate compare ru", two.parent) == ["runs"]
    assert completed("tokrate compare runs/b", two.parent) == ["runs/base"]
    assert completed("tokrate compare ten", two.parent) == ["tensorboard:"]
    assert completed("tokrate compare tensorboard:ru", two.parent) == ["tensorboard:runs"]

"""The command line: an error of ours is one line, not a trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokrate import __version__
from tokrate.cli import cli


def tokrate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command as a person would."""
    command = [str(Path(sys.executable).parent / "tokrate"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--arms", "padded,best"], "train-on-all"),
        (["demo", "--seconds", "0"], "above 0"),
        (["demo", "--logger", "tensorbord"], "Did you mean 'tensorboard'"),
        (["sync", "nowhere"], "expected the journal of a run"),
        (["sync", ".", "--logger", "{nojson"], "expected names"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    """What was found, what was expected, exit code 2, and nothing written."""
    done = tokrate(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_version_and_help() -> None:
    """`--version` and `-h` say what people expect of them."""
    assert __version__ in CliRunner().invoke(cli, ["--version"]).output
    listed = CliRunner().invoke(cli, ["-h"]).output
    assert "demo" in listed
    assert "sync" in listed

"""The run's folder: which one it is, and that nobody else writes to it."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from tokrate.errors import ConfigError, RunFolderError
from tokrate.journal import JOURNAL_NAME, first_line
from tokrate.run import RunInfo

ID_NAME = ".tokrate-id"
"""Says whose folder it is before the journal does: a run that starts claims it with this file."""
CLAIM_TIMEOUT_S = 1.0

LEGAL = re.compile(r"\w[\w.=+@, -]{0,119}")


def check_run(run: RunInfo) -> RunInfo:
    """Return the run with an id, if its name and id can name a folder.

    Raises:
        ConfigError: They hold a path separator, begin with a dot or are too long.
    """
    for what, text in (("name", run.name), ("id", run.id)):
        if text is None and what == "id":
            continue
        if not isinstance(text, str) or not LEGAL.fullmatch(text) or text[-1] in ". ":
            shown = text if isinstance(text, str) else repr(text)
            legal = re.sub(r"[^\w=+@,-]+", "-", shown).strip("-.")[:120] or "run"
            raise ConfigError(
                f"run {what} {text!r} cannot name a folder: expected letters, digits and any of "
                f"'.=+@,_ -', at most 120 of them, without a path separator; use {legal!r}"
            )
    return replace(run, id=run.id or os.urandom(6).hex())


def open_folder(root: Path, run: RunInfo) -> tuple[Path, bool]:
    """The folder of this run: that of the same id if there is one, else a new one.

    A name that another run has taken gets `-2`, `-3` and so on; runs never share a folder.

    Returns:
        The folder, and whether it was made just now.

    Raises:
        RunFolderError: It cannot be created or read.
    """
    made, folder = False, root
    try:
        for number in count(1):
            folder = root / (run.name if number == 1 else f"{run.name}-{number}")
            made = _make(folder)
            if (_owner(folder) or _claim(folder, str(run.id))) == run.id:
                return folder, made
    except OSError as error:
        if made:
            remove(folder)
        raise RunFolderError(
            f"the run folder {root / run.name} cannot be used ({error.strerror or error}): "
            "expected a folder that this process may write to; pass another dir="
        ) from error
    raise AssertionError("count never ends")


def release(folder: Path) -> None:
    """Give back a folder in which no run has begun."""
    if _owner(folder) is None:
        with suppress(OSError):
            (folder / ID_NAME).unlink()


def remove(folder: Path) -> None:
    """Take back a folder that was made for a run that could not begin."""
    import shutil  # not at import: `import tokrate` stays light

    shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _owner(folder: Path) -> str | None:
    """Id of the run whose journal lies in the folder, if one does."""
    line = first_line(folder / JOURNAL_NAME)
    return None if line is None else str(line.get("id"))


def _claim(folder: Path, run_id: str) -> str:
    """Id of the run that has the folder: ours, unless another process was faster."""
    path = folder / ID_NAME
    try:
        with path.open("x") as file:
            file.write(run_id)
        return run_id
    except FileExistsError:
        until_s = time.monotonic() + CLAIM_TIMEOUT_S
        while not (owner := path.read_text()) and time.monotonic() < until_s:
            time.sleep(0.01)  # it is being written just now
        if not owner:  # whoever began to write it has died
            path.write_text(run_id)
        return owner or run_id

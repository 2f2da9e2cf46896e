"""Finds files below a folder, and says how far it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tokrate.compare.progress import Progress
from tokrate.errors import CompareError


def files_below(folder: Path, wanted: Callable[[str], bool], progress: Progress) -> Iterator[Path]:
    """Files below a folder whose names are wanted, in order of their paths.

    Links to folders are not followed.

    Raises:
        CompareError: There is no such folder.
    """
    if not folder.is_dir():
        raise CompareError(f"{folder}: no such folder")
    looked_at = 0
    for path, folders, names in os.walk(folder):
        folders.sort()
        looked_at += len(names)
        progress(f"files looked at in {folder}", looked_at, None)
        yield from (Path(path, name) for name in sorted(names) if wanted(name))

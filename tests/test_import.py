"""`import tokrate` is light, and says what it offers."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import tokrate

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "wandb", "mlflow", "tensorboard", "numpy", "rich", "click")


def loaded_after(statement: str) -> set[str]:
    """Heavy packages that a fresh interpreter holds after the statement."""
    program = f"{statement}; import sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_is_light() -> None:
    """Neither torch nor a tracker is loaded, nor anything else that takes its time."""
    assert loaded_after("import tokrate") == set()


def test_the_check_can_fail() -> None:
    """The same check sees a package that was imported."""
    assert loaded_after("import tokrate, numpy") == {"numpy"}


def test_counting_lists_needs_no_torch() -> None:
    """Torch is not loaded by counting either, unless the caller passed a tensor."""
    assert "torch" not in loaded_after("import tokrate; tokrate.count_tokens([[1, 2]])")


def test_public_names_are_sorted_and_there() -> None:
    """What is listed is what is visible."""
    assert sorted(tokrate.__all__) == tokrate.__all__
    visible = {name for name in vars(tokrate) if name[0] != "_" and name[0].isupper()}
    functions = {"count_tokens", "open_logger", "watch_model"}
    assert visible | functions == set(tokrate.__all__)


def test_version_is_that_of_the_package() -> None:
    """The version stands in pyproject.toml and nowhere differs from it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tokrate.__version__ == project["version"]

"""A backend is found by its name, and every way of not finding one has a message of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tokrate.backends.registry import (
    BUILT_INS,
    check_options,
    find_backend,
    is_installed,
    known_backends,
)
from tokrate.errors import (
    AmbiguousBackendError,
    BrokenBackendError,
    ConfigError,
    MissingPackageError,
    UnknownBackendError,
    UnknownOptionError,
)
from tokrate.run import RunInfo
from tokrate.testing import MemoryBackend

PLUGIN = Path(__file__).parent.parent / "plugin"


def distribution(
    folder: Path, name: str, entry_points: dict[str, str], version: str = "1.0"
) -> None:
    """Make an installed distribution as far as the import system can see one."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[tokrate.backends]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for made-up packages that is on the import path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


# Found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_INS)
def test_built_ins_are_found(name: str) -> None:
    """Every built-in has a factory with a docstring that names its options."""
    factory = find_backend(name)
    check_options(name, factory, {})
    assert callable(factory)
    assert factory.__doc__ is not None
    assert "Args:" in factory.__doc__


def test_a_dotted_path_is_found() -> None:
    """A module and an attribute need no entry point."""
    assert find_backend("tokrate.testing:MemoryBackend") is MemoryBackend


def test_known_backends_tell_their_origin(site: Path) -> None:
    """The list of names says what is built in and which package brings the rest."""
    distribution(site, "tokrate-graphite", {"graphite": "json:dumps"}, "0.4")
    known = known_backends()
    assert known["wandb"] == "built in"
    assert known["graphite"] == "tokrate-graphite 0.4"


def test_one_distribution_seen_twice_is_one(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install beside a copy of itself does not make a name ambiguous."""
    distribution(site, "tokrate-graphite", {"graphite": "json:dumps"})
    distribution(tmp_path / "again", "tokrate-graphite", {"graphite": "json:dumps"})
    monkeypatch.syspath_prepend(tmp_path / "again")
    assert find_backend("graphite") is json.dumps


# Not found ---------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known() -> None:
    """A misspelled name is answered with the likely one and with all of them."""
    with pytest.raises(UnknownBackendError) as error:
        find_backend("tensorbord")
    assert str(error.value) == (
        "no backend is called 'tensorbord'. Did you mean 'tensorboard'? Known: console, "
        "tensorboard, mlflow, wandb. Any other one is named by its dotted path, "
        "package.module:attribute"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_pkg.backends:Thing", "there is no module 'no_such_pkg'"),
        ("json.nothing:Thing", "there is no module 'json.nothing'"),
        ("tokrate.testing:MemoryBackent", "did you mean 'MemoryBackend'?"),
        ("tokrate.testing:", "is no dotted path"),
        (":Thing", "is no dotted path"),
        ("../evil:Thing", "is no dotted path"),
    ],
)
def test_a_wrong_dotted_path_says_what_is_wrong(path: str, message: str) -> None:
    """A missing module, a missing attribute and a path that is none are told apart."""
    with pytest.raises(UnknownBackendError, match=message.replace("?", r"\?")):
        find_backend(path)


def test_two_distributions_with_one_name(site: Path) -> None:
    """Both packages are named, and the way to choose one."""
    distribution(site, "graphite-one", {"graphite": "one:Backend"})
    distribution(site, "graphite-two", {"graphite": "two:Backend"}, "2.0")
    with pytest.raises(AmbiguousBackendError) as error:
        find_backend("graphite")
    assert str(error.value) == (
        "several packages claim the backend name 'graphite': graphite-one 1.0 (one:Backend), "
        "graphite-two 2.0 (two:Backend). Uninstall all but one, or name the one you mean by its "
        "dotted path, such as 'one:Backend'"
    )


def test_a_claim_on_a_built_in_is_ambiguous(site: Path) -> None:
    """A package cannot quietly take the place of a built-in."""
    distribution(site, "better-wandb", {"wandb": "better:Backend"})
    with pytest.raises(AmbiguousBackendError, match=r"tokrate itself, better-wandb 1\.0"):
        find_backend("wandb")


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker that is not installed is answered with what to type."""
    monkeypatch.setitem(sys.modules, "mlflow", None)  # the import system then finds no such package
    with pytest.raises(MissingPackageError) as error:
        find_backend("mlflow")
    assert "run  pip install 'tokrate[mlflow]'" in str(error.value)
    assert callable(find_backend("tensorboard")), "another tracker is not affected"


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves a folder `wandb/` in the working directory, which Python could import."""
    (tmp_path / "left_by_a_run").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("left_by_a_run")
    assert is_installed("rich")


def test_a_broken_plug_in_shows_the_original_error(site: Path) -> None:
    """Installed but failing to import is neither missing nor unknown."""
    (site / "brokenplug.py").write_text("import no_such_dependency\n")
    distribution(site, "tokrate-broken", {"broken": "brokenplug:Backend"})
    with pytest.raises(BrokenBackendError) as error:
        find_backend("broken")
    assert "'broken' from tokrate-broken 1.0 fails to import" in str(error.value)
    assert "No module named 'no_such_dependency'" in str(error.value)
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    with pytest.raises(BrokenBackendError, match="no_such_dependency"):
        find_backend("brokenplug:Backend")


def test_what_cannot_be_called_is_broken() -> None:
    """A dotted path to a value is told as such."""
    with pytest.raises(BrokenBackendError, match="is a str; expected something to call"):
        find_backend("tokrate.backends.registry:ENTRY_POINT_GROUP")


# Options -----------------------------------------------------------------------------------------


def test_an_unknown_option_names_the_accepted() -> None:
    """A misspelled option is answered with the likely one and with all of them."""
    with pytest.raises(UnknownOptionError) as error:
        check_options("mlflow", find_backend("mlflow"), {"traking_uri": "x"})
    assert str(error.value) == (
        "backend 'mlflow' has no option 'traking_uri'. Did you mean 'tracking_uri'? It takes: "
        "tracking_uri, experiment, timeout_s"
    )


def test_a_backend_without_options_says_so() -> None:
    """There is nothing to list, and the message does not pretend."""
    with pytest.raises(UnknownOptionError, match=r"has no option 'x'\. It takes no options"):
        check_options("memory", MemoryBackend, {"x": 1})


def test_a_needed_option_is_asked_for() -> None:
    """An option without a default is missed before training, with how to write it."""

    def factory(run: RunInfo, *, host: str, port: int = 1) -> Any:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"needs the option host: write logger: {x: {host: ...}}"):
        check_options("x", factory, {"port": 2})
    check_options("x", factory, {"host": "h"})


def test_a_factory_may_take_anything() -> None:
    """A factory with keyword arguments of any name gets them."""
    check_options("x", lambda run, **options: None, {"whatever": 1})


# The real thing ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plug-in of tests/plugin, built by its own build backend and unpacked like pip does."""
    folder = tmp_path_factory.mktemp("plugin")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=PLUGIN,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


IN_A_NEW_PROCESS = """
import json, sys
from pathlib import Path
import tokrate
from tokrate.backends.registry import check_options, find_backend, known_backends
from tokrate.run import Entry, Outcome, RunInfo
factory = find_backend("jsonlines")
check_options("jsonlines", factory, {"name": "mine"})
backend = factory(RunInfo("r", id="1", folder=Path(sys.argv[1])), name="mine")
backend.write([Entry(time_unix_ms=0, step=3, metrics={"x": 1.5})])
backend.close(Outcome.FINISHED)
heavy = {"torch", "wandb", "mlflow", "tensorboard"} & set(sys.modules)
print(json.dumps([known_backends()["jsonlines"], sorted(heavy)]))
"""


def test_an_installed_plug_in_is_found_by_name(installed: Path, tmp_path: Path) -> None:
    """A built and installed package adds its backend, and finding it imports no tracker."""
    done = _python(IN_A_NEW_PROCESS, installed, str(tmp_path))
    assert json.loads(done) == ["tokrate-jsonlines 1.2.3", []]
    assert (tmp_path / "mine.jsonl").read_text().splitlines() == [
        '{"step": 3, "metrics": {"x": 1.5}}',
        '{"outcome": "finished"}',
    ]


def test_a_second_claim_on_the_plug_ins_name_is_reported(installed: Path, tmp_path: Path) -> None:
    """With another package of the same name beside it, neither is taken."""
    distribution(tmp_path, "other-jsonlines", {"jsonlines": "other:Backend"}, "9.9")
    code = f"""
import sys
sys.path.append({str(tmp_path)!r})
from tokrate.backends.registry import find_backend
try:
    find_backend("jsonlines")
except Exception as error:
    print(type(error).__name__, error)
"""
    told = _python(code, installed)
    assert told.startswith("AmbiguousBackendError")
    assert "other-jsonlines 9.9 (other:Backend)" in told
    assert "tokrate-jsonlines 1.2.3 (jsonlines_plugin:JsonLinesBackend)" in told


def _python(code: str, site: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(site)!r})\n{code}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

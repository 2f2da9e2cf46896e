"""Event files as TensorBoard reads them, after resumes, removed folders and full disks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.readers import accumulate, read_tensorboard
from tokrate.backends._tensorboard import TensorBoardBackend
from tokrate.errors import BackendError, ConfigError
from tokrate.run import Outcome, RunInfo
from tokrate.steady import STEADY
from tokrate.testing.points import START_MS, entries, new_run


def steps_of(folder: Path) -> list[int]:
    """The steps that TensorBoard shows."""
    return [step for step, _ in read_tensorboard(folder)]


def test_an_entry_is_one_event_at_its_own_time(tmp_path: Path) -> None:
    """All values of an entry share an event, stamped when the entry was made."""
    run = new_run(tmp_path)
    backend = TensorBoardBackend(run)
    backend.write(entries([{"throughput/a": 1.0, "throughput/b": 2.0}], [7]))
    backend.close(Outcome.FINISHED)
    events = accumulate(tmp_path / "conformance")
    (a,), (b,) = events.Scalars("throughput/a"), events.Scalars("throughput/b")
    assert (a.step, a.wall_time) == (b.step, b.wall_time) == (7, START_MS / 1000)


def test_it_is_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    """Every write is on the disk when it returns, without a close."""
    run = new_run(tmp_path)
    backend = TensorBoardBackend(run)
    for count in range(1, 4):
        backend.write(entries([{"x": 1.0}], [count]))
        assert steps_of(tmp_path / "conformance") == list(range(1, count + 1))
    backend.close(Outcome.FINISHED)


def test_a_log_root_gets_a_folder_per_run(tmp_path: Path) -> None:
    """With `dir` the event files lie in a folder of the run's name in there."""
    backend = TensorBoardBackend(new_run(tmp_path), dir=str(tmp_path / "boards"))
    backend.write(entries([{"x": 1.0}]))
    backend.close(Outcome.FINISHED)
    assert steps_of(tmp_path / "boards" / "conformance") == [0]
    assert not list((tmp_path / "conformance").iterdir())


@pytest.mark.parametrize("wrong", [3, "", "gs://bucket/logs", ["a"]])
def test_a_wrong_dir_is_told_before_training(wrong: Any, tmp_path: Path) -> None:
    """A log root that is no local folder is an error of the configuration."""
    with pytest.raises(ConfigError, match="tensorboard: dir"):
        TensorBoardBackend(new_run(tmp_path), dir=wrong)


def test_the_configuration_is_a_text(tmp_path: Path) -> None:
    """The run's name, tags and flat configuration are shown as a table on the text page."""
    run = new_run(tmp_path, config={"model": {"layers": 2, "name": "a|b\nc"}}, tags=("base",))
    backend = TensorBoardBackend(run)
    backend.write([])
    backend.close(Outcome.FINISHED)
    (event,) = accumulate(tmp_path / "conformance").Tensors("run/text_summary")
    table = event.tensor_proto.string_val[0].decode().splitlines()
    assert "| run | conformance |" in table
    assert "| tags | base |" in table
    assert "| model.layers | 2 |" in table
    assert "| model.name | a\\|b c |" in table


def test_both_rates_share_a_chart(tmp_path: Path) -> None:
    """The page of custom scalars has a chart that holds active and raw tokens per second."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    backend = TensorBoardBackend(new_run(tmp_path))
    backend.write([])
    backend.close(Outcome.FINISHED)
    (event,) = accumulate(tmp_path / "conformance").Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(event.tensor_proto.string_val[0]).category
    assert [list(chart.multiline.tag) for chart in category.chart] == [
        ["^throughput/active_tps$", "^throughput/raw_tps$"],
        ["^throughput/padded_frac$", "^throughput/masked_frac$"],
        ["^throughput/data_wait_frac$"],
    ]


def hparams(folder: Path) -> dict[str, Any]:
    """The messages for the page HPARAMS, by their name, as the page's own code reads them."""
    from tensorboard.plugins.hparams import metadata

    parsers = {
        "experiment": metadata.parse_experiment_plugin_data,
        "session_start_info": metadata.parse_session_start_info_plugin_data,
        "session_end_info": metadata.parse_session_end_info_plugin_data,
    }
    contents = accumulate(folder).PluginTagToContent("hparams")
    found = {tag.removeprefix("_hparams_/"): content for tag, content in contents.items()}
    return {name: parsers[name](content) for name, content in found.items()}


def test_a_run_has_a_row_of_its_own(tmp_path: Path) -> None:
    """HPARAMS knows the configuration, typed, the steady values as columns, and the good end."""
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS

    config = {"lr": 0.1, "packing": True, "model": {"name": "tiny"}, "big": 2**60, "no": None}
    backend = TensorBoardBackend(new_run(tmp_path, config=config))
    backend.write(entries([{"throughput/steady_active_tps": 5.0}]))
    backend.close(Outcome.FINISHED)
    found = hparams(tmp_path / "conformance")
    columns = [info.name.tag for info in found["experiment"].metric_infos]
    assert columns[:4] == [f"throughput/{name}" for name in STEADY]
    values = {
        key: getattr(value, value.WhichOneof("kind"))
        for key, value in found["session_start_info"].hparams.items()
    }
    assert {info.name for info in found["experiment"].hparam_infos} == set(values)
    assert values.pop("tokrate")
    assert values == {
        "lr": 0.1,
        "packing": True,
        "model.name": "tiny",
        "big": str(2**60),
        "no": "null",
    }
    assert found["session_end_info"].status == STATUS_SUCCESS
    assert not [path for path in (tmp_path / "conformance").iterdir() if path.is_dir()]


def test_a_failed_session_leaves_the_row_open(tmp_path: Path) -> None:
    """The page keeps the first end that it is told, and the next session may finish."""
    told = []
    for outcome, resume_step in ((Outcome.FAILED, None), (Outcome.FINISHED, 1)):
        backend = TensorBoardBackend(new_run(tmp_path, resume_step=resume_step))
        backend.write(entries([{"x": 1.0}], [1 if resume_step is None else 2]))
        backend.close(outcome)
        told.append("session_end_info" in hparams(tmp_path / "conformance"))
    assert told == [False, True]
    assert steps_of(tmp_path / "conformance") == [1, 2]


def test_what_concerns_the_run_is_written_once(tmp_path: Path) -> None:
    """A resumed session repeats the facts, which may be new, and no layout and no row."""
    for resume_step in (None, 1):
        backend = TensorBoardBackend(new_run(tmp_path, resume_step=resume_step))
        backend.write([])
        backend.close(Outcome.FAILED)
    files = sorted((tmp_path / "conformance").iterdir())
    held = [
        {tag: tag.encode() in file.read_bytes() for tag in ("run/text", "custom_", "_hparams_")}
        for file in files
    ]
    assert held == [
        {"run/text": True, "custom_": True, "_hparams_": True},
        {"run/text": True, "custom_": False, "_hparams_": False},
    ]


def test_a_reconnect_keeps_what_this_session_wrote(tmp_path: Path) -> None:
    """The cut of a resume is made once, not again when an outage needs a new file."""
    run = new_run(tmp_path)
    backend = TensorBoardBackend(run)
    backend.write(entries([{"x": 1.0}, {"x": 1.0}, {"x": 1.0}], [1, 2, 3]))
    backend.close(Outcome.FAILED)
    again = TensorBoardBackend(new_run(tmp_path, resume_step=2))
    again.write(entries([{"x": 2.0}], [3]))
    _swap(tmp_path / "conformance", tmp_path / "away")
    with pytest.raises(BackendError):
        again.write(entries([{"x": 2.0}], [4]))
    _swap(tmp_path / "away", tmp_path / "conformance")
    again.write(entries([{"x": 2.0}], [4]))
    again.close(Outcome.FINISHED)
    points = [(step, values["x"]) for step, values in read_tensorboard(tmp_path / "conformance")]
    assert points == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_removed_folder_is_noticed_and_made_again(tmp_path: Path) -> None:
    """Writing to a removed file would succeed and be lost; it is an outage instead."""
    run = new_run(tmp_path)
    backend = TensorBoardBackend(run)
    backend.write(entries([{"x": 1.0}], [1]))
    shutil.rmtree(tmp_path / "conformance")
    with pytest.raises(BackendError, match="cannot write event files in") as error:
        backend.write(entries([{"x": 1.0}], [2]))
    assert error.value.retryable
    backend.write(entries([{"x": 1.0}], [2]))
    backend.close(Outcome.FINISHED)
    assert steps_of(tmp_path / "conformance") == [2]


FULL_DISK = """
import resource, sys
from pathlib import Path
from tokrate.backends._tensorboard import TensorBoardBackend
from tokrate.errors import BackendError
from tokrate.run import Outcome
from tokrate.testing.points import entries, new_run
folder = Path(sys.argv[1])
backend = TensorBoardBackend(new_run(folder))
backend.write(entries([{"x": 1.0}], [1]))
(file,) = (folder / "conformance").glob("*tfevents*")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, limits[1]))
batch = entries(({"x": 1.0} for _ in range(99)), range(2, 101))
for attempt in range(2):
    try:
        backend.write(batch)
        sys.exit("a full disk went unnoticed")
    except BackendError as error:
        assert error.retryable, error
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
backend.write(batch)
backend.close(Outcome.FINISHED)
heavy = {"torch", "tensorflow"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_full_disk_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """What was written by halves is cut off, and the batch is there once when it fits again."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_of(tmp_path / "conformance") == list(range(1, 101))
    assert len(list((tmp_path / "conformance").iterdir())) == 1, "each try left a file"


def test_opening_imports_nothing_heavy() -> None:
    """The factory runs in the training's own thread and loads no tracker."""
    code = (
        "import sys; from tokrate.backends.registry import find_backend, BUILT_INS\n"
        "for name in BUILT_INS: find_backend(name)\n"
        "print(sorted({'torch', 'tensorboard', 'wandb', 'mlflow', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_without_a_folder_is_refused() -> None:
    """A run that open_logger has not prepared has no place for its files."""
    with pytest.raises(ConfigError, match="has no folder"):
        TensorBoardBackend(RunInfo("r", id="1"))


def _swap(folder: Path, other: Path) -> None:
    """Move a folder away and leave a file in its place, or take the file's place."""
    if other.is_file():
        other.unlink()
    folder.rename(other)
    folder.touch()

"""torchtune's own recipe really trains here, by a change of its configuration alone.

Run by `make test-torchtune`, in an environment of its own; skipped where torchtune is missing.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtune", reason="make test-torchtune has it")

from omegaconf import OmegaConf
from torchtune import __file__ as torchtune_file
from torchtune import config

from tokrate import Outcome, ends, integrations
from tokrate.errors import ConfigError, MissingPackageError, UnknownBackendError
from tokrate.integrations import torchtune as components

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata on torch
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # files of the data sets package
]

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = EXAMPLES / "torchtune_finetune.yaml"
RECIPE = Path(torchtune_file).parents[1] / "recipes" / "full_finetune_single_device.py"
ROWS, MICRO_BATCHES = 4, 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, tokenizer and data of the example."""
    folder = tmp_path_factory.mktemp("torchtune") / "tiny"
    runpy.run_path(str(EXAMPLES / "torchtune_tiny.py"))["main"](str(folder))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is downloaded, and nothing is left over from the test before."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(components, "_current", None)
    monkeypatch.setattr(components, "_said", set())
    yield
    for close in list(ends._open.values()):  # of a recipe that stopped: the process would end here
        close(Outcome.FAILED)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What tokrate warned of."""
    with caplog.at_level(logging.WARNING, "tokrate"):
        yield lambda: "\n".join(r.getMessage() for r in caplog.records if r.name == "tokrate")


def settings(tiny: Path, out: Path, *changes: str) -> Any:
    """The example's configuration, with changes as `tune run` takes them."""
    changes = (f"folder={tiny}", f"output_dir={out}/out", f"metric_logger.dir={out}/runs", *changes)
    return OmegaConf.merge(OmegaConf.load(CONFIG), OmegaConf.from_dotlist(list(changes)))


def set_up(cfg: Any) -> Any:
    """The recipe, ready to train."""
    recipe = runpy.run_path(str(RECIPE))["FullFinetuneRecipeSingleDevice"](cfg=cfg)
    recipe.setup(cfg=cfg)
    return recipe


def train(cfg: Any) -> None:
    """What the recipe's `main` does."""
    recipe = set_up(cfg)
    recipe.train()
    recipe.cleanup()


def lines(out: Path) -> list[dict[str, Any]]:
    """All lines of the journal."""
    path = out / "runs" / "torchtune" / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(out: Path) -> list[dict[str, Any]]:
    """The records in the journal."""
    return [line["record"] for line in lines(out) if "record" in line]


def samples(cfg: Any, **changes: Any) -> Any:
    """The data set, made by torchtune alone."""
    tokenizer = config.instantiate(cfg.tokenizer)
    options = {k: v for k, v in cfg.dataset.items() if k not in ("_component_", "component")}
    plain = OmegaConf.create({"_component_": cfg.dataset.component, **options, **changes})
    return config.instantiate(plain, tokenizer)


def hand_count(cfg: Any) -> list[tuple[int, int, int]]:
    """Raw, active and padded of each micro-batch of an epoch, in plain Python."""
    counts = []
    everything = list(samples(cfg))
    for start in range(0, len(everything), ROWS):
        rows = everything[start : start + ROWS]
        width = max(len(row["tokens"]) for row in rows)
        active = sum(label != -100 for row in rows for label in row["labels"][1:])
        real = sum(len(row["tokens"]) for row in rows)
        counts.append((ROWS * width, active, ROWS * width - real))
    return counts


def total(counts: list[tuple[int, int, int]]) -> tuple[int, ...]:
    """The sum of some counts."""
    return tuple(map(sum, zip(*counts, strict=True)))


def counts_of(record: dict[str, Any]) -> tuple[int, ...]:
    """The three counts of a record."""
    return record["raw_tokens"], record["active_tokens"], record["padded_tokens"]


# --- counts --------------------------------------------------------------------------------------


def test_rows_are_those_of_a_hand_count(tiny: Path, tmp_path: Path) -> None:
    """Each record has the tokens of its two optimizer steps of two micro-batches."""
    cfg = settings(tiny, tmp_path)
    train(cfg)
    epoch = hand_count(cfg)
    found = records(tmp_path)
    assert [record["step"] for record in found] == [2, 4, 6, 8]
    assert [record["steps"] for record in found] == [2, 2, 2, 2]
    window = 2 * MICRO_BATCHES
    expected = [total(epoch[:window]), total(epoch[window:])] * 2
    assert [counts_of(record) for record in found] == expected
    assert found[-1]["total_active_tokens"] == 2 * total(epoch)[1]


def test_packs_are_those_of_a_hand_count(tiny: Path, tmp_path: Path) -> None:
    """Packed data is counted as the data set hands it out; its tail is padding."""
    cfg = settings(tiny, tmp_path, "dataset.packed=True", "batch_size=1", "epochs=1")
    train(cfg)
    packs = samples(cfg)
    real = sum(len(sample["tokens"]) for sample in samples(cfg, packed=False))
    (record,) = records(tmp_path)
    used = [packs[place] for place in range(2 * MICRO_BATCHES)]
    active = sum(int((pack["labels"][1:] != -100).sum()) for pack in used)
    assert (record["raw_tokens"], record["active_tokens"]) == (4 * 512, active)
    left = sum(len(packs[place]["tokens"]) for place in range(4, len(packs)))
    padded = sum(count_tail(pack) for pack in used)
    assert record["padded_tokens"] == padded
    tails = sum(count_tail(packs[place]) for place in range(len(packs)))
    assert 4 * 512 + left - tails == real  # the whole data set, without its padding


def count_tail(pack: Any) -> int:
    """Slots at the end of a pack that hold no token, in plain Python."""
    pad_id = 0  # torchtune fills packs up with 0, whatever the tokenizer's padding is
    tokens = pack["tokens"].tolist()
    while tokens and tokens[-1] == pad_id:
        tokens.pop()
    return len(pack["tokens"]) - len(tokens)


def test_the_recipes_own_rate_stands_beside_ours(tiny: Path, tmp_path: Path) -> None:
    """Its name is an alias of our rate; its own number is kept under a name of its own."""
    train(settings(tiny, tmp_path, "log_every_n_steps=1"))
    entries = [line for line in lines(tmp_path) if line["kind"] == "entry"]
    with_record = [entry for entry in entries if "record" in entry]
    for entry in with_record:
        rate = entry["metrics"]["tokens_per_second_per_gpu"]
        assert rate == entry["record"]["active_tps_per_device"]
    theirs = {
        entry["step"]: entry["metrics"]["torchtune/tokens_per_second_per_gpu"]
        for entry in entries
        if "torchtune/tokens_per_second_per_gpu" in entry["metrics"]
    }
    assert list(theirs) == [entry["step"] for entry in with_record]
    assert sum("loss" in entry["metrics"] for entry in entries) == len(theirs)


def test_a_checkpoint_is_a_phase(tiny: Path, tmp_path: Path) -> None:
    """The time of the save between two epochs belongs to no window."""
    train(settings(tiny, tmp_path))
    paused = [record["paused_s"] for record in records(tmp_path)]
    assert paused[0] > 0  # the set-up: model, tokenizer, data
    assert paused[2] > 0  # the save at the end of the first epoch
    assert (paused[1], paused[3]) == (0, 0)


# --- restarts ------------------------------------------------------------------------------------


def test_totals_survive_a_restart(tiny: Path, tmp_path: Path) -> None:
    """A recipe that resumes goes on with the same run, from the totals in its own state."""
    train(settings(tiny, tmp_path))
    files = "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]"
    cfg = settings(tiny, tmp_path, "resume_from_checkpoint=True", "epochs=3", files)
    with pytest.warns(UserWarning, match="does not match the checkpoint value"):
        train(cfg)
    second = [record for record in records(tmp_path) if record["session"] == 2]
    assert [record["step"] for record in second] == [6, 8, 10, 12]
    assert second[-1]["total_active_tokens"] == 3 * total(hand_count(cfg))[1]
    sessions = [line["resume_step"] for line in lines(tmp_path) if line["kind"] == "run"]
    assert sessions == [None, 4]


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_recipe_without_our_collate_says_so(
    tiny: Path, tmp_path: Path, said: Callable[[], str]
) -> None:
    """Training goes on, and no rate is made up from nothing."""
    train(settings(tiny, tmp_path, "collate_fn=torchtune.data.padded_collate_sft"))
    assert [record["raw_tps"] for record in records(tmp_path)] == [None] * 4
    assert said().count("the recipe trains and nothing is counted") == 1


def test_a_recipe_without_our_logger_says_so(
    tiny: Path, tmp_path: Path, said: Callable[[], str]
) -> None:
    """The collate function alone has nothing to count into, and training goes on."""
    cfg = settings(tiny, tmp_path)
    cfg.metric_logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": f"{tmp_path}/logs",
    }
    train(cfg)
    assert said().count("nothing is counted: expected metric_logger:") == 1
    assert list((tmp_path / "logs").glob("log_*.txt"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("metric_logger.logger=tensorbord", UnknownBackendError),
        ("metric_logger.logger=wandb", MissingPackageError),
        ("metric_logger.metrics=most", ConfigError),
        ("dataset.component=torchtune.datasets.no_such_dataset", ConfigError),
    ],
)
def test_mistakes_are_found_before_training(
    tiny: Path, tmp_path: Path, change: str, error: type[Exception]
) -> None:
    """A wrong key or component stops the recipe in its set-up."""
    with pytest.raises(error) as found:
        set_up(settings(tiny, tmp_path, change))
    assert found.type is error


def test_an_unknown_version_is_said(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    """A torchtune that was never run with these components is named."""
    monkeypatch.setattr(integrations, "version", lambda package: "0.5.0")
    monkeypatch.setattr(integrations, "_said", set())
    integrations.check_version("torchtune")
    assert "torchtune 0.5.0 is not known to work: tokrate was tested with torchtune 0.6.1" in said()


# --- the example ---------------------------------------------------------------------------------


def test_the_example_runs_as_a_user_runs_it(tiny: Path, tmp_path: Path) -> None:
    """`tune run` with the example's configuration leaves a journal."""
    command = [
        *(str(Path(sys.executable).parent / "tune"), "run", "full_finetune_single_device"),
        *("--config", str(CONFIG), f"folder={tiny}", f"output_dir={tmp_path}/out"),
        f"metric_logger.dir={tmp_path}/runs",
    ]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["kind"] for line in lines(tmp_path)][-1] == "end"
    assert lines(tmp_path)[-1]["outcome"] == "finished"
    assert lines(tmp_path)[0]["config"]["optimizer"]["lr"] == 0.01
    assert len(records(tmp_path)) == 4

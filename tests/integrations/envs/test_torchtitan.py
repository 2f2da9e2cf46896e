"""torchtitan's own `train` runs here, on the CPU in an accelerator's place.

Run by `make test-torchtitan`, in an environment of its own; skipped where torchtitan is missing.
`torchtitan_on_cpu.py` says what stands in for what; nothing was run on an accelerator.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="make test-torchtitan has it")

import torch

from tokrate import integrations
from tokrate.errors import ConfigError, UnknownBackendError
from tokrate.integrations import torchtitan as integration

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
ROWS, LENGTH = 2, 256
IGNORED = -100


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer and the data of the example."""
    folder = tmp_path_factory.mktemp("torchtitan") / "tiny"
    python(f"import torchtitan_tiny; torchtitan_tiny.main({str(folder)!r})", folder)
    return folder


def variables(folder: Path) -> dict[str, str]:
    """The environment of the example's processes."""
    added = {"TINY": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | added | {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{HERE}"}


def python(code: str, folder: Path) -> str:
    """What a piece of Python prints, with torchtitan on the CPU."""
    command = [
        sys.executable,
        "-c",
        f"import torchtitan_on_cpu; torchtitan_on_cpu.stand_in()\n{code}",
    ]
    return finished(command, folder)


def finished(command: Sequence[str], folder: Path) -> str:
    """What a command prints, once it has ended well."""
    done = subprocess.run(
        command, env=variables(folder), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(tiny: Path, out: Path, config: str = "tiny", *options: str, ranks: int = 1) -> str:
    """What `torchrun -m torchtitan.train` prints."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--standalone", str(HERE / "torchtitan_on_cpu.py")),
        *("--module", "torchtitan_tiny", "--config", config, "--hf_assets_path", str(tiny)),
        *("--dump_folder", str(out / "out"), "--metrics.dir", str(out / "runs"), *options),
    ]
    return finished(command, tiny)


def lines(out: Path, run: str = "tiny") -> list[dict[str, Any]]:
    """All lines of the journal."""
    path = out / "runs" / run / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(out: Path, run: str = "tiny") -> list[dict[str, Any]]:
    """The records in the journal."""
    return [line["record"] for line in lines(out, run) if "record" in line]


def counts(record: dict[str, Any]) -> tuple[int, int, int]:
    """The three counts of a record."""
    return record["raw_tokens"], record["active_tokens"], record["padded_tokens"]


# --- counts --------------------------------------------------------------------------------------


def test_rows_of_text_are_those_of_a_hand_count(tiny: Path, tmp_path: Path) -> None:
    """Every slot is a target, none is padding; a checkpoint closes a window of its own."""
    train(tiny, tmp_path)
    found = records(tmp_path)
    assert [(r["step"], r["steps"]) for r in found] == [(1, 1), (2, 1), (3, 1), (4, 1), (6, 2)]
    slots = [steps * ROWS * LENGTH for steps in (1, 1, 1, 1, 2)]
    assert [counts(r) for r in found] == [(slot, slot, 0) for slot in slots]
    assert found[-1]["data_wait_s"] > 0
    assert found[1]["paused_s"] > 0  # the validation at step 1
    assert found[3]["paused_s"] > 0  # the checkpoint at step 3
    assert found[2]["paused_s"] == 0
    assert lines(tmp_path)[-1]["outcome"] == "finished"
    assert lines(tmp_path)[0]["config"]["training"]["seq_len"] == LENGTH


def test_what_torchtitan_logs_stands_beside_ours(tiny: Path, tmp_path: Path) -> None:
    """Its rate keeps its name as an alias of ours, and its own number a name of its own."""
    train(tiny, tmp_path, "tiny", "--training.steps", "4", "--validator.no-enable")
    entries = [line for line in lines(tmp_path) if line["kind"] == "entry"]
    rates = [e["metrics"]["throughput_tps"] for e in entries if "record" in e]
    assert rates == [r["raw_tps_per_device"] for r in records(tmp_path)]
    theirs = {
        e["step"]: e["metrics"]["torchtitan/throughput_tps"]
        for e in entries
        if "torchtitan/throughput_tps" in e["metrics"]
    }
    ours = {r["step"]: r["raw_tps"] for r in records(tmp_path)}
    assert list(theirs) == [1, 2, 4]
    assert theirs[1] < ours[1]  # theirs has the set-up in its time
    assert 0.8 < theirs[2] / ours[2] < 1.25  # one step, nothing else: the same number
    assert theirs[4] < max(ours[3], ours[4])  # theirs has the checkpoint at step 3 in its time
    seen = [e["metrics"]["n_tokens_seen"] for e in entries if "n_tokens_seen" in e["metrics"]]
    assert seen == [ROWS * LENGTH * step for step in (1, 2, 4)]


def test_chats_are_those_of_a_hand_count(tiny: Path, tmp_path: Path) -> None:
    """Questions are masked, and what is left of a row is padding."""
    train(tiny, tmp_path, "chat", "--training.steps", "4", "--validator.no-enable")
    code = (
        "import json, torchtitan_tiny as t; c = t.plain_chat(); "
        f"tok = c.tokenizer.build(tokenizer_path={str(tiny)!r}); "
        f"it = iter(c.dataloader.build(dp_world_size=1, dp_rank=0, tokenizer=tok, "
        f"seq_len={LENGTH}, local_batch_size={ROWS}, snapshot_every_n_steps=None)); "
        "rows = [(i['input'].tolist(), l.tolist()) for i, l in (next(it) for _ in range(4))]; "
        "print('ROWS', json.dumps([rows, tok.eos_id]))"
    )
    (shown,) = (x for x in python(code, tiny).splitlines() if x.startswith("ROWS"))
    batches, end = json.loads(shown.removeprefix("ROWS"))
    expected = [by_hand(tokens, labels, end) for tokens, labels in batches]
    assert sum(padded for _, _, padded in expected) > 0
    found = [counts(record) for record in records(tmp_path, "chat")]
    assert found == expected  # steps 1, 2 and 4 are logged, and step 3 is a checkpoint


def by_hand(tokens: list[list[int]], labels: list[list[int]], end: int) -> tuple[int, int, int]:
    """Raw, active and padded of a batch, in plain Python."""
    active = sum(label != IGNORED for row in labels for label in row)
    padded = 0
    for row, targets in zip(tokens, labels, strict=True):
        for token, target in zip(reversed(row), reversed(targets), strict=True):
            if token != end or target != IGNORED:
                break
            padded += 1
    return sum(map(len, tokens)), active, padded


# --- ranks and restarts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degree", "batches"),
    [
        # Not data_parallel_shard: "Cannot use ReduceOp.PREMUL_SUM with Gloo". Not
        # context_parallel: it needs flex attention, which has no backward on CPUs.
        (("data_parallel_replicate", "--parallelism.data_parallel_shard_degree", "1"), 2),
        (("tensor_parallel",), 1),
        (("pipeline_parallel", "--parallelism.pipeline_parallel_schedule", "1F1B"), 1),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_two_ranks_make_one_record(
    tiny: Path, tmp_path: Path, degree: tuple[str, ...], batches: int
) -> None:
    """Data parallel ranks are added up; those that share a batch are counted once."""
    name, *more = degree
    options = (f"--parallelism.{name}_degree", "2", *more, "--training.steps", "2")
    train(tiny, tmp_path, "tiny", *options, "--validator.no-enable", ranks=2)
    last = records(tmp_path)[-1]
    slots = batches * ROWS * LENGTH
    assert counts(last) == (slots, slots, 0)
    assert last["devices"] == 2
    losses = [e["metrics"].get("loss_metrics/global_avg_loss") for e in lines(tmp_path)[1:-1]]
    assert all(loss > 0 for loss in losses if loss is not None)  # torchtitan's -1 is no loss


def test_totals_survive_a_restart(tiny: Path, tmp_path: Path) -> None:
    """A job that goes on from a checkpoint is the next session of the same run."""
    train(tiny, tmp_path, "tiny", "--training.steps", "3", "--validator.no-enable")
    train(tiny, tmp_path, "tiny", "--training.steps", "6", "--validator.no-enable")
    last = records(tmp_path)[-1]
    assert (last["step"], last["session"]) == (6, 2)
    assert last["total_active_tokens"] == 6 * ROWS * LENGTH
    sessions = [line["resume_step"] for line in lines(tmp_path) if line["kind"] == "run"]
    assert sessions == [None, 3]


# --- what goes wrong -----------------------------------------------------------------------------


def plain_config() -> Any:
    """A configuration of torchtitan's own."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import torchtitan_tiny
    finally:
        sys.path.remove(str(EXAMPLES))
    return torchtitan_tiny.plain()


def test_mistakes_are_found_before_training() -> None:
    """A misspelled option or backend is an error where the configuration is made."""
    with pytest.raises(ConfigError, match="no option names: expected some of aliases, dir"):
        integration.with_tokrate(plain_config(), names="x")
    with pytest.raises(UnknownBackendError, match="Did you mean 'tensorboard'"):
        integration.with_tokrate(plain_config(), logger="tensorbord")
    with pytest.raises(ConfigError, match="expected torchtitan's own; derive yours from"):
        integration.with_tokrate(integration.with_tokrate(plain_config()))


def test_a_component_of_the_users_own_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A validator of another kind stays, and it is said what follows from that."""

    class Mine(type(plain_config().validator)):  # type: ignore[misc]
        pass

    config = plain_config()
    config.validator = mine = Mine()
    with caplog.at_level(logging.WARNING, "tokrate"):
        assert integration.with_tokrate(config).validator is mine
    assert "its time is time of training" in caplog.text


def test_a_batch_without_positions_leaves_the_fractions_out() -> None:
    """Nothing is guessed where nothing tells padding."""
    found: dict[str, Any] = {}
    meter: Any = SimpleNamespace(update=lambda **parts: found.update(parts))
    labels = torch.ones(2, 4, dtype=torch.long)
    integration._count(meter, {"input": labels}, labels)
    assert list(found) == ["labels"]


def test_an_unknown_version_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torchtitan that was never run with this is named."""
    monkeypatch.setattr(integrations, "version", lambda package: "0.2.2")
    monkeypatch.setattr(integrations, "_said", set())
    with caplog.at_level(logging.WARNING, "tokrate"):
        integrations.check_version("torchtitan")
    assert "torchtitan 0.2.2 is not known to work" in caplog.text

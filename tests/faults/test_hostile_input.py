"""Hostile input through the whole pipe: the same treatment everywhere, and all of it counted."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.readers import (
    mlflow_run,
    read_mlflow,
    read_tensorboard,
    read_wandb,
    wandb_records,
)
from faults.watching import adds_up, journal_lines
from tokrate import RunInfo, open_logger
from tokrate.testing.points import HOSTILE_CONFIG, HOSTILE_TAGS

NAMES: list[Any] = [
    *("loss", "Train/Loss (mean)", "eval/acc@5", "mfu(%)", "a=b", "c#d", "e[0]", "{f}", "g,h;i"),
    *("//a", "b//c", "/d", "e/", "f/../g", "./h", "..", ".", "/", "//", "a/b/c/d"),
    *("größe", "速度", "🚀", "", " ", "a b", "a.b", "a-b", "a:b", "a\nb", "a\0b", "a\\b", "'a'"),
    *("_hidden", "__", "_x/_y", "UPPER", "Upper", "x" * 300, "x" * 301, "\udcff", "%s{}{0}"),
    *("loss/prefixed", "throughput/raw_tps", "throughput", "nan", "null", "a$1", 3, None, (1, 2)),
]


def three(store_uri: str) -> dict[str, Any]:
    """A `logger` key with all three trackers."""
    return {
        "console": False,
        "tensorboard": {},
        "mlflow": {"tracking_uri": store_uri},
        "wandb": {"mode": "offline"},
    }


def values_shown(name: str, folder: Path, store_uri: str) -> dict[tuple[int, str], Any]:
    """Step and key to what the tracker shows."""
    if name == "tensorboard":
        rows = read_tensorboard(folder)
    elif name == "mlflow":
        rows = read_mlflow(store_uri, "a1")
    else:
        rows = read_wandb(folder)
    found = [((step, key), value) for step, values in rows for key, value in values.items()]
    assert max(Counter(key for key, _ in found).values()) == 1
    return dict(found)


def check_every_value(logger: Any, folder: Path, store_uri: str) -> None:
    """What the journal has is shown, or counted as left out, in each tracker."""
    entries = [line for line in journal_lines(folder) if line["kind"] == "entry"]
    kept = {(e["step"], key): value for e in entries for key, value in e["metrics"].items()}
    for name, stats in logger.stats().backends.items():
        shown = values_shown(name, folder, store_uri)
        left_out = sum(stats.values_left_out.values())
        assert set(shown) <= set(kept), name
        assert len(shown) + left_out == len(kept), f"{name}: {len(shown)}, {stats}"
        for key, value in shown.items():
            assert as_shown(value) == pytest.approx(as_shown(kept[key]), nan_ok=True, rel=1e-6)
    adds_up(logger.stats(), folder)


def as_shown(value: Any) -> float:
    """A number, be it W&B's text for one that JSON does not know."""
    return float(value)


def test_names_of_every_class(tmp_path: Path, store_uri: str) -> None:
    """Each name is written in one legal form in all trackers, or left out and counted."""
    with open_logger(three(store_uri), run=RunInfo("a", id="a1"), dir=tmp_path) as logger:
        for step, name in enumerate(NAMES):
            for _ in range(2):  # the same name has the same fate
                logger.log_metrics({name: float(step), "beside": 1.0}, step=step * 2 + _)
    stats = logger.stats()
    entries = [line for line in journal_lines(tmp_path / "a") if line["kind"] == "entry"]
    kept = [key for entry in entries for key in entry["metrics"] if key != "beside"]
    assert len(kept) + stats.left_out["name"] == 2 * len(NAMES)
    assert sum(entry["metrics"]["beside"] for entry in entries) == 2 * len(NAMES)
    owners = Counter(kept)
    assert set(owners.values()) == {2}, "two names were merged into one"
    check_every_value(logger, tmp_path / "a", store_uri)


VALUES: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "minus_inf": -math.inf,
    "huge_int": 10**400,
    "big_int": 10**300,
    "max_float": 1.7e308,
    "tiny": 5e-324,
    "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
    "f16_inf": torch.tensor(70000.0).half(),
    "zero_d": np.array(4),
    "one": torch.tensor([2]),
    "grad": torch.tensor(0.25, requires_grad=True),
    "numpy": np.float32(0.1),
    "bool": True,
    "fraction": Fraction(1, 3),
    "text": "0.5",
    "none": None,
    "two": torch.ones(2),
    "complex": 1j,
    "list": [1.0],
    "object": object(),
    "meta": torch.empty((), device="meta"),
}
NOT_NUMBERS = {"huge_int", "text", "none", "two", "complex", "list", "object", "meta"}


def test_values_of_every_kind(tmp_path: Path, store_uri: str) -> None:
    """What is a number is kept; each tracker shows or counts it, and none takes another along."""
    with open_logger(three(store_uri), run=RunInfo("a", id="a1"), dir=tmp_path) as logger:
        logger.log_metrics(VALUES, step=0)
        for step, (name, value) in enumerate(VALUES.items(), start=1):
            logger.log_metrics({name: value}, step=step)
        for step in (-1, 1.5, None, "1", 2**63, True, math.nan, np.float64(2)):
            logger.log_metrics({"x": 1.0}, step=step)
        for step in (np.int64(100), torch.tensor(101), 2**63 - 1):
            logger.log_metrics({"x": 1.0}, step=step)
    stats = logger.stats()
    entries = [line for line in journal_lines(tmp_path / "a") if line["kind"] == "entry"]
    assert set(entries[0]["metrics"]) == set(VALUES) - NOT_NUMBERS
    assert stats.left_out == {"value": 2 * len(NOT_NUMBERS), "step": 8}
    check_every_value(logger, tmp_path / "a", store_uri)
    left_out = {name: dict(s.values_left_out) for name, s in stats.backends.items()}
    assert left_out["mlflow"] == {"nan": 2, "inf": 6}
    assert left_out["tensorboard"] == {"too large for float32": 4}
    assert left_out["wandb"] == {}


def test_configurations_of_every_kind(tmp_path: Path, store_uri: str) -> None:
    """Nested, long, odd and secret values: all trackers take the run, none shows a secret."""
    config = HOSTILE_CONFIG | {
        "surrogate": "\udcff",
        "\udcfe": 1,
        "numbers": list(range(500)),
        "wandb_api_key": "geheim",
        "db": {"url": "postgresql://me:geheim@host/db", "Password": "geheim"},
        "many": {f"key{i}": i for i in range(1000)},
        "tensor": torch.zeros(3),
    }
    run = RunInfo("größer 速い", id="a1", config=config, tags=(*HOSTILE_TAGS, "\udcff"))
    with open_logger(three(store_uri), run=run, dir=tmp_path) as logger:
        logger.log_metrics({"loss": 1.0}, step=1)
    folder = tmp_path / run.name
    adds_up(logger.stats(), folder, shown=dict.fromkeys(("tensorboard", "mlflow", "wandb"), 1))
    for name in ("tensorboard", "mlflow", "wandb"):
        assert values_shown(name, folder, store_uri) == {(1, "loss"): 1.0}
    params = mlflow_run(store_uri, "a1").data.params
    assert params["many.key999"] == "999"
    assert len(params["long"]) == 6000
    assert params["db.url"] == "postgresql://me:***@host/db"
    first = next(r.run for r in wandb_records(folder) if r.WhichOneof("record_type") == "run")
    in_wandb = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert (in_wandb["many"]["key999"], in_wandb["wandb_api_key"]) == (999, "***")
    assert in_wandb["long"] == "x" * 10_000
    for path in [*folder.rglob("*"), tmp_path / "mlflow.db"]:
        if path.is_file():
            assert b"geheim" not in path.read_bytes(), path

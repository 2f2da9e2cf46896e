"""`tokrate demo`: the same small model fed the same real text in four ways, and why speeds differ.

data ──► batches ──► train (the arms take turns) ──────► result ──► report
(text)   (padded,      │     ▲                             │
          packed)    live  model                         claims
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokrate.config import parse_logger
from tokrate.demo.arms import ARMS, Arm, choose_arms
from tokrate.demo.result import ArmResult, Claim, DemoResult
from tokrate.errors import ConfigError, MissingPackageError
from tokrate.opening import find_factories

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ARMS", "ArmResult", "Claim", "DemoResult", "run_demo"]


def run_demo(
    arms: Sequence[str],
    logger: Sequence[str],
    dir: Path,  # noqa: A002 - the word that people use, as in open_logger
    seconds: float,
    console: Console,
) -> DemoResult:
    """Train each arm for a while, log it, and print what explains the differences.

    Args:
        arms: Names of `ARMS`, in the order in which they are trained.
        logger: Names of backends, besides the journal.
        dir: Folder that the runs' folders are made in.
        seconds: Time of training, all arms together.
        console: Where everything is printed.

    Raises:
        ConfigError: An arm, a backend or the time is wrong; nothing has been written then.
        MissingPackageError: torch, or a tracker's package, is not installed.
    """
    chosen = choose_arms(arms)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"seconds: found {seconds}; expected a number above 0, such as 80")
    spec = _logger_key(logger, dir)
    find_factories(parse_logger(spec))  # a mistake is told before the text is read
    _require_torch()
    return _run(chosen, list(logger), spec, dir, seconds, console)


def _run(
    arms: Sequence[Arm],
    backends: Sequence[str],
    spec: Mapping[str, Any],
    folder: Path,
    seconds: float,
    console: Console,
) -> DemoResult:
    # Imported here, because these load torch.
    from tokrate.demo import report
    from tokrate.demo.claims import check_claims, measure_sensitivity
    from tokrate.demo.data import load_documents
    from tokrate.demo.live import open_display
    from tokrate.demo.model import SmallTransformer
    from tokrate.demo.train import Job, train_arms

    training, held_out = load_documents()
    job = Job(
        training=training,
        held_out=held_out,
        logger=spec,
        dir=folder,
        seconds=seconds / len(arms),
    )
    report.print_opening(job, len(arms), console)
    with open_display(console, [arm.name for arm in arms], job.seconds) as display:
        results = train_arms(arms, job, display)
    sensitivity = measure_sensitivity(SmallTransformer(job.seed), held_out[:16])
    claims = check_claims({result.name: result for result in results}, sensitivity)
    result = DemoResult(arms=tuple(results), claims=claims)
    report.print_report(result, console)
    report.print_how_to_open(result.arms, backends, folder, console)
    return result


def _logger_key(backends: Sequence[str], folder: Path) -> dict[str, Any]:
    """The `logger` key; the demo shows records itself, so the console backend stays off."""
    options: dict[str, dict[str, Any]] = {
        "mlflow": {
            "tracking_uri": f"sqlite:///{folder / 'mlflow.db'}",
            "experiment": "tokrate-demo",
        },
        "wandb": {"project": "tokrate-demo", "mode": "offline"},
    }
    names = [name for name in backends if name not in ("none", "console")]
    return {**{name: options.get(name, {}) for name in names}, "console": False}


def _require_torch() -> None:
    if find_spec("torch") is None:
        raise MissingPackageError(
            "the demo trains with PyTorch, and the package 'torch' is not installed: run  "
            "pip install 'tokrate[torch]'"
        )

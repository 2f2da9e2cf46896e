"""Real runs with all trackers, made once for all tests of the comparison."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compare.making import Window, log_run, noisy, records


@pytest.fixture(scope="session")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four runs, each in the journal, TensorBoard, MLflow and W&B.

    `padded`, `packed`, `quick` (a third faster) and `resumed`, which was stopped behind its
    checkpoint and whose second session closes its windows at other steps.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("WANDB_", "MLFLOW_")) and name != "WANDB_SERVICE":
                patch.delenv(name)
        root = tmp_path_factory.mktemp("logged")
        patch.setenv("NETRC", str(root / "no-netrc"))
        # Required: reached before the first record, which comes seconds later in a real run, too.
        ready = {"required": True}
        trackers = {
            "tensorboard": ready,
            "mlflow": {"tracking_uri": f"sqlite:///{root}/mlflow.db", "experiment": "all", **ready},
            "wandb": {"mode": "offline", "project": "all", **ready},
        }
        make = [Window(elapsed_s=3.0, warmup=True)]
        log_run(root, "padded", records(make + noisy(30, 1)), trackers)
        log_run(root, "packed", records(make + noisy(30, 2, active=900, padded=20)), trackers)
        log_run(root, "quick", records(make + noisy(30, 3, speed=4 / 3)), trackers)
        first = records(make + noisy(11, 4), every=2)  # steps 1, 3 … 23; checkpoint at 15
        log_run(root, "resumed", first, trackers, id="resumed")
        second = records(make + noisy(11, 5), first_step=18, every=2, total=8 * 400)
        log_run(root, "resumed", second, trackers, id="resumed", resume_step=15)
    return root


def sources_of(root: Path) -> dict[str, str]:
    """The same runs, from each of the four."""
    return {
        "journal": str(root),
        "tensorboard": f"tensorboard:{root}",
        "mlflow": f"mlflow:sqlite:///{root}/mlflow.db#all",
        "wandb": f"wandb:{root}",
    }

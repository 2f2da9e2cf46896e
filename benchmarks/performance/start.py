"""What is paid once: the import, and opening the run until its first `log` call has returned.

python benchmarks/performance/start.py [OUT.json]

    import   wall time of a fresh interpreter that imports one module, less that of one that imports
             nothing; interleaved, each with its bytecode written, as after an installation
    open     a fresh process in which torch, and what the contender imports at its top, is loaded,
             and their garbage collected, which takes 0.1 s and would hit one or the other. Timed
             from there until the first `log` call has returned: everything that the opening imports
             or starts on the way is in it. "with import" adds the contender's own import

tokrate connects its trackers in the background. How long that takes, and the processor time of the
process until then, stand in columns of their own. W&B's service is a process beside it, for
everybody, whose processor time is not in them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from common import Part, Row, Table, main, versions_of

FAST_ROUNDS, SLOW_ROUNDS = 21, 3
"""Imports: of the bare interpreter and tokrate, and of the peers."""
OPEN_ROUNDS = 3
QUICK_ROUNDS = 6
"""Openings of tokrate that end with the first `log` call, for a median that means something."""
TRACKERS = ("tensorboard", "mlflow", "wandb")
GIVE_UP_S = 120.0
IMPORT_AIM_MS, OPEN_AIM_MS = 60.0, 20.0

BARE, OURS = "nothing", "tokrate"
IMPORTS = {
    BARE: "pass",
    OURS: "import tokrate",
    "tokrate, its names used": "from tokrate import ThroughputMeter, count_tokens, open_logger",
    "wandb": "import wandb",
    "mlflow": "import mlflow",
    "torch.utils.tensorboard": "import torch.utils.tensorboard",
    "torchtune.training.metric_logging": "import torchtune.training.metric_logging",
    "lightning.pytorch.loggers": "import lightning.pytorch.loggers",
    "accelerate.tracking": "import accelerate.tracking",
}
WAITS = "the loop waits; no journal; where MLflow fails, so does the run"
ONE = "one tracker; counts and measures nothing"
SEVERAL = "no counts; no journal"
IMPORT_LACKS = {
    "wandb": ONE,
    "mlflow": ONE,
    "torch.utils.tensorboard": f"{ONE}; loads torch",
    "torchtune.training.metric_logging": f"{SEVERAL}; loads torch",
    "lightning.pytorch.loggers": f"{SEVERAL}; loads torch",
    "accelerate.tracking": f"{SEVERAL}; loads torch",
}

BY_HAND = "by hand: all three in turn"
OPEN_OURS = "tokrate: all three"
OPEN_LACKS = {
    "wandb: init, log": "one tracker",
    "mlflow: start_run, log_metrics": "one tracker",
    "SummaryWriter, add_scalar": "one tracker",
    BY_HAND: WAITS,
    "Lightning: its three loggers": WAITS,
    "accelerate: init_trackers, log": WAITS,
}


def environment() -> dict[str, str]:
    """For all processes: bytecode is kept, nobody talks, nobody goes online."""
    quiet = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | quiet


# --- import --------------------------------------------------------------------------------------


def measure_imports() -> Table:
    """Milliseconds of each import."""
    times_ms: dict[str, list[float]] = {name: [] for name in IMPORTS}
    every = FAST_ROUNDS // SLOW_ROUNDS
    for number in range(-1, FAST_ROUNDS):  # the first writes bytecode and fills the disk's cache
        for name, code in IMPORTS.items():
            if name in IMPORT_LACKS and number >= 0 and number % every:
                continue
            start_s = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", code], check=True, env=environment(), capture_output=True
            )
            if number >= 0:
                times_ms[name].append((time.perf_counter() - start_s) * 1000)
    bare_ms = float(np.median(times_ms.pop(BARE)))
    medians = {name: float(np.median(found)) - bare_ms for name, found in times_ms.items()}
    fastest = min((name for name in medians if name in IMPORT_LACKS), key=medians.__getitem__)
    return Table(
        title="Start, import",
        about=f"one import in a fresh interpreter, which takes {bare_ms:.0f} ms itself, left out",
        columns={"median": "ms", "fastest": "ms"},
        rows=[
            Row(
                name=name,
                values={"median": medians[name], "fastest": min(found) - bare_ms},
                lacks=IMPORT_LACKS.get(name, ""),
                ours=name.startswith("tokrate"),
            )
            for name, found in times_ms.items()
        ],
        baseline="wandb",
        ratio_of="median",
        aim=f"under {IMPORT_AIM_MS:.0f} ms",
        result=(
            f"{medians[OURS]:.0f} ms, neither torch nor a tracker among it; the fastest peer, "
            f"{fastest}, takes {medians[fastest]:.0f} ms"
        ),
        reached=medians[OURS] < IMPORT_AIM_MS,
    )


# --- open ----------------------------------------------------------------------------------------


def openings() -> dict[str, tuple[tuple[str, ...], Callable[[Any], Callable[..., object]]]]:
    """Contender → what it imports at its top, and how it opens what it writes to."""
    import writers as w

    three = [w.summary_writer, w.mlflow_fluent, w.wandb_run]
    tensorboard, loggers = "torch.utils.tensorboard", "lightning.pytorch.loggers"
    return {
        "wandb: init, log": (("wandb",), w.wandb_run),
        "mlflow: start_run, log_metrics": (("mlflow",), w.mlflow_fluent),
        "SummaryWriter, add_scalar": ((tensorboard,), w.summary_writer),
        BY_HAND: ((tensorboard, "mlflow", "wandb"), partial(w.in_turn, three)),
        "Lightning: its three loggers": (
            (loggers,),
            partial(w.in_turn, [partial(w.lightning, tracker) for tracker in TRACKERS]),
        ),
        "accelerate: init_trackers, log": (
            ("accelerate", "mlflow"),
            partial(w.accelerate, list(TRACKERS)),
        ),
    }


def open_once(name: str, folder: Path, *, wait: bool) -> dict[str, float]:
    """In a process of its own: milliseconds from the opening on."""
    os.chdir(folder)
    import torch  # noqa: F401 - a training has loaded it

    if name == OPEN_OURS:
        import_s = seconds_to_import(["tokrate"])
        return open_ours(folder, import_s, wait=wait)
    from writers import Place

    modules, opener = openings()[name]
    import_s = seconds_to_import(modules)
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    with contextlib.ExitStack() as stack:
        log = opener(Place(folder=folder, uri=f"sqlite:///{folder / 'mlflow.db'}", stack=stack))
        log({"train/loss": 0.5}, step=1)
        opened_s = time.perf_counter() - begin_s
        found = {
            "first log": opened_s,
            "with import": opened_s + import_s,
            "processor": time.process_time() - cpu_s,
        }
    return {column: seconds * 1000 for column, seconds in found.items()}


def seconds_to_import(modules: Iterable[str]) -> float:
    """Import them; what they leave to collect is collected, outside the time."""
    begin_s = time.perf_counter()
    for module in modules:
        import_module(module)
    import_s = time.perf_counter() - begin_s
    gc.collect()
    return import_s


def open_ours(folder: Path, import_s: float, *, wait: bool) -> dict[str, float]:
    """The same for tokrate; with `wait`, also until the trackers have the entry."""
    from tokrate import RunInfo, open_logger

    spec = {
        "tensorboard": {},
        "mlflow": {"tracking_uri": f"sqlite:///{folder / 'mlflow.db'}"},
        "wandb": {"mode": "offline"},
        "console": False,
    }
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    logger = open_logger(spec, run=RunInfo("start"), dir=folder, close_timeout_s=GIVE_UP_S)
    opened_s = time.perf_counter() - begin_s
    logger.log_metrics({"train/loss": 0.5}, step=1)
    logged_s = time.perf_counter() - begin_s
    found = {
        "open_logger": opened_s,
        "first log": logged_s,
        "with import": logged_s + import_s,
    }
    if wait:
        while any(stats.waiting for stats in logger.stats().backends.values()):
            if time.perf_counter() - begin_s > GIVE_UP_S:
                raise SystemExit(f"the trackers did not open: {logger.stats()}")
            time.sleep(0.005)
        found["in trackers"] = time.perf_counter() - begin_s
        found["processor"] = time.process_time() - cpu_s
        logger.close()
    return {column: seconds * 1000 for column, seconds in found.items()}


def run_opening(name: str, *, wait: bool = True) -> dict[str, float]:
    """Open once in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="tokrate-start-") as folder:
        command = [sys.executable, __file__, "--open", name, folder, str(int(wait))]
        done = subprocess.run(command, check=True, env=environment(), capture_output=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_openings() -> Table:
    """Milliseconds of each opening."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*OPEN_LACKS, OPEN_OURS)}
    quick = []
    for _ in range(OPEN_ROUNDS):
        for name in found:
            found[name].append(run_opening(name))
        quick += [run_opening(OPEN_OURS, wait=False) for _ in range(QUICK_ROUNDS // OPEN_ROUNDS)]
    medians = {name: median_of(times) for name, times in found.items()}
    medians[OPEN_OURS] |= median_of([*found[OPEN_OURS], *quick])
    ours, by_hand = medians[OPEN_OURS], medians[BY_HAND]
    return Table(
        title="Start, open",
        about=f"{', '.join(TRACKERS)} opened in a fresh process, until the first log has returned",
        columns={"first log": "ms", "with import": "ms", "in trackers": "ms", "processor": "ms"},
        rows=[
            Row(
                name=name,
                values=dict(values),
                lacks=OPEN_LACKS.get(name, ""),
                ours=name == OPEN_OURS,
            )
            for name, values in medians.items()
        ],
        baseline=BY_HAND,
        ratio_of="first log",
        aim=f"first log within {OPEN_AIM_MS:.0f} ms of open_logger",
        result=(
            f"{ours['first log']:.1f} ms, open_logger being {ours['open_logger']:.1f} of them; by "
            f"hand {by_hand['first log']:,.0f} ms. In the background it takes "
            f"{ours['in trackers']:,.0f} ms until all three have the entry, and "
            f"{ours['processor']:,.0f} ms of processor time, by hand {by_hand['processor']:,.0f}, "
            "where the trackers' own imports came before"
        ),
        reached=ours["first log"] < OPEN_AIM_MS,
    )


def median_of(times: list[dict[str, float]]) -> dict[str, float]:
    """The median of each column, over those that have it."""
    columns = {column: None for found in times for column in found}
    return {
        column: float(np.median([found[column] for found in times if column in found]))
        for column in columns
    }


def measure() -> Part:
    """Both tables."""
    return Part(
        name="start",
        tables=[measure_imports(), measure_openings()],
        versions=versions_of(
            "wandb", "mlflow", "tensorboard", "torch", "torchtune", "lightning", "accelerate"
        ),
    )


if __name__ == "__main__":
    if "--open" in sys.argv:
        warnings.simplefilter("ignore")
        logging.getLogger("tokrate").setLevel(logging.ERROR)
        name, folder, wait = sys.argv[2:]
        print(json.dumps(open_once(name, Path(folder), wait=wait == "1")), flush=True)
        if wait == "0":
            os._exit(0)  # the trackers are still opening
    else:
        main(measure)

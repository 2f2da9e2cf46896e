"""What several test modules need: a clock that the test turns, and meters driven by events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokrate import ThroughputMeter, ThroughputRecord, TokenCounts

CASES = Path(__file__).parent / "cases"


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def load_cases(name: str) -> list[dict[str, Any]]:
    """The cases of one file of `tests/cases`."""
    return json.loads((CASES / f"{name}.json").read_text())["cases"]


def drive(meter: ThroughputMeter, clock: Clock, events: list[list[Any]]) -> None:
    """Play the events of a case; every `record` is compared with what it expects."""
    for event in events:
        match event:
            case ["add", raw, active, padded]:
                meter.add(TokenCounts(raw, active, padded))
            case ["tick", seconds]:
                clock.now += seconds
            case ["phase", name, inner]:
                with meter.phase(name):
                    drive(meter, clock, inner)
            case ["record", step, expected]:
                record = meter.record(step)
                assert {name: getattr(record, name) for name in expected} == expected
            case _:
                raise ValueError(f"unknown event {event}")


def make_record(**changes: Any) -> ThroughputRecord:
    """The record of the 8-slot example of the README, with some fields changed."""
    fields: dict[str, Any] = {
        "step": 1,
        "active_tps": 2.0,
        "raw_tps": 4.0,
        "padded_frac": 0.25,
        "masked_frac": 0.25,
        "active_tps_per_device": 2.0,
        "raw_tps_per_device": 4.0,
        "raw_tokens": 8,
        "active_tokens": 4,
        "padded_tokens": 2,
        "steps": 1,
        "elapsed_s": 2.0,
        "paused_s": 0.0,
        "data_wait_s": None,
        "devices": 1,
        "rank_imbalance": 1.0,
        "total_raw_tokens": 8,
        "total_active_tokens": 4,
        "total_elapsed_s": 2.0,
        "session": 1,
        "mfu": None,
        "warmup": False,
        "time_unix_ms": 1_700_000_000_000,
    }
    return ThroughputRecord(**(fields | changes))

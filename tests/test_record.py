"""The record: its schema is a standard, so it only changes on purpose."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from driving import make_record
from tokrate import ThroughputRecord
from tokrate.names import MetricNames, parse_aliases

GOLDEN = Path(__file__).parent / "golden" / "record.json"


def test_schema_is_the_golden_one() -> None:
    """Fields, their order, types and values are those of the golden file."""
    golden = json.loads(GOLDEN.read_text())
    assert make_record().to_dict() == golden["record"]
    assert list(make_record().to_dict()) == list(golden["record"])
    assert {f.name: f.type for f in fields(ThroughputRecord)} == golden["types"]
    assert make_record().metrics(MetricNames()) == golden["metrics"]


def test_record_cannot_be_changed() -> None:
    """A record is a measurement: nobody changes it afterwards, and nobody adds to it."""
    record = make_record()
    with pytest.raises(FrozenInstanceError):
        record.step = 2  # type: ignore[misc]
    assert not hasattr(record, "__dict__")


def test_round_trip() -> None:
    """A record survives JSON, with fields of a newer schema passed over."""
    record = make_record(mfu=0.4)
    text = json.dumps(record.to_dict() | {"field_of_tomorrow": 1})
    assert ThroughputRecord.from_dict(json.loads(text)) == record


def test_unknown_numbers_are_left_out() -> None:
    """What is None is not sent; a share of nothing is None, too."""
    record = make_record(padded_frac=None, masked_frac=None, padded_tokens=None)
    assert "throughput/padded_frac" not in record.metrics(MetricNames())
    assert record.masked_tokens is None
    assert make_record(data_wait_s=0.0, elapsed_s=0.0).data_wait_frac is None


def test_all_numbers_are_sent_on_request() -> None:
    """`metrics="all"` sends every number of the record, the warm-up mark as 0 or 1."""
    metrics = make_record(warmup=True, data_wait_s=1.0, mfu=0.5).metrics(MetricNames(metrics="all"))
    assert len(metrics) == len(fields(ThroughputRecord)) + 1
    assert metrics["throughput/warmup"] == 1
    assert metrics["throughput/data_wait_frac"] == 0.5


def test_aliases_repeat_a_number() -> None:
    """Old dashboards find the number under its old name."""
    names = MetricNames(aliases=parse_aliases("torchtune"))
    assert make_record().metrics(names)["tokens_per_second_per_gpu"] == 2.0

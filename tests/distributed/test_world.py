"""Four real ranks under torchrun: what each saw, against numbers worked by hand.

All of it runs once, in `world.py`; the tests look at what the ranks wrote down.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launching import torchrun

RANKS = range(4)
Seen = dict[str, list[Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Scenario to what each rank saw."""
    out = tmp_path_factory.mktemp("world")
    torchrun(Path(__file__).with_name("world.py"), str(out), ranks=len(RANKS))
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in RANKS]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def assert_records(records: list[dict[str, Any]], **expected: Any) -> None:
    """All ranks hold the same record, with these fields."""
    for record in records:
        assert {name: record.get(name) for name in expected} == expected, record


# One batch is 8 raw, 4 active and 2 padded slots; the window lasts 2 s on 4 devices.
ONE_BATCH = (8, 4, 2, 4.0, 2.0, 1.0)
TWO_BATCHES = (16, 8, 4, 8.0, 4.0, 2.0)
FOUR_BATCHES = (32, 16, 8, 16.0, 8.0, 4.0)


@pytest.mark.parametrize("counted", ["before", "shard"])
@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("dp", FOUR_BATCHES),
        ("tp", ONE_BATCH),
        ("cp", ONE_BATCH),
        ("pp", ONE_BATCH),
        ("dp_tp", TWO_BATCHES),
        ("dp_cp", TWO_BATCHES),
    ],
)
def test_counted_before_sharding_or_on_the_shard(
    seen: Seen, mesh: str, counted: str, expected: tuple[float, ...]
) -> None:
    """Either way of counting gives the tokens that the model trained on, without a warning."""
    raw, active, padded, raw_tps, active_tps, per_device = expected
    assert_records(
        seen[f"{mesh}_{counted}"],
        raw_tokens=raw,
        active_tokens=active,
        padded_tokens=padded,
        raw_tps=raw_tps,
        active_tps=active_tps,
        raw_tps_per_device=per_device,
        padded_frac=0.25,
        masked_frac=0.25,
        said=[],
    )


def test_mesh_that_is_a_part_of_the_world(seen: Seen) -> None:
    """One dimension of a mesh, or two of three: only its two ranks are summed."""
    for ranks in zip(*seen["part_of_the_world"], strict=True):
        assert_records(list(ranks), raw_tokens=16, raw_tps=8.0)
    per_device = [record["raw_tps_per_device"] for record in seen["part_of_the_world"][0]]
    assert per_device == [2.0, 2.0, 4.0]  # of 4 devices in the world, unless 2 are declared


def test_uneven_ranks(seen: Seen) -> None:
    """100 + 200 + 300 + 400 tokens, divided by the slowest rank's 4 s and not by a mean."""
    assert_records(
        seen["uneven"],
        raw_tokens=1000,
        elapsed_s=4.0,
        raw_tps=250.0,
        raw_tps_per_device=62.5,
        paused_s=10.0,
        rank_imbalance=1.6,  # 400 to a mean of 250
    )


def test_rank_without_tokens(seen: Seen) -> None:
    """Three batches on four ranks are three batches; the imbalance shows the idle one."""
    assert_records(
        seen["one_rank_without_tokens"],
        raw_tokens=24,
        raw_tps=12.0,
        padded_frac=0.25,
        rank_imbalance=4 / 3,  # 8 to a mean of 6
        said=[],
    )


def test_one_rank_waits_for_data(seen: Seen) -> None:
    """The longest wait is the window's, though the other ranks watched nothing."""
    assert_records(seen["waiting_for_data"], data_wait_s=1.0, elapsed_s=4.0)


@pytest.mark.parametrize(
    ("name", "writer"), [("first", 0), ("last", 3), ("first of last stage", 2)]
)
def test_only_the_writer_makes_anything(seen: Seen, name: str, writer: int) -> None:
    """One journal with one record, on the rank that was named; on the others not even a folder."""
    made = [rank[name] for rank in seen["writers"]]
    assert made == [[["run", "entry", "end"]] if rank == writer else [] for rank in RANKS]
    assert [rank[f"{name}: exists"] for rank in seen["writers"]] == [r == writer for r in RANKS]


def test_one_collective_for_each_window(seen: Seen) -> None:
    """Update calls nothing of torch.distributed, and record one gather, without a warning."""
    for calls in seen["collectives"]:
        assert calls["update 1"] == calls["update 2"] == []
        assert calls["record 1"] == calls["record 2"] == ["c10d::_allgather_base_"]
        assert calls["all_reduce"] == ["c10d::allreduce_"]  # so it does see collectives


# --- what the ranks say --------------------------------------------------------------------------


def test_identical_batches_are_named(seen: Seen) -> None:
    """The writer alone says, once, which ranks are fed the same and what to declare."""
    first, *others = seen["same_batch"]
    assert others == [[], [], []]
    assert len(first) == 1
    assert "ranks [1, 3] counted the same first batch although replicas=1" in first[0]
    assert "RankLayout(replicas=2), or RankLayout.from_mesh(...)" in first[0]


def test_ranks_of_a_group_have_global_names(seen: Seen) -> None:
    """In a group of ranks 1 and 3 nobody is called rank 0."""
    *others, last = seen["same_batch_in_a_group"]
    assert others == [[], [], []]
    assert "ranks [1, 3] counted the same first batch" in last[0]


def test_batches_without_targets_are_no_reason_to_warn(seen: Seen) -> None:
    """All labels masked on all ranks says nothing of who was fed what."""
    assert seen["all_masked_batches"] == [[], [], [], []]


def test_replicas_that_share_nothing_are_named(seen: Seen) -> None:
    """The other way round: tokens would be divided that nobody else counted."""
    first, *others = seen["replicas_that_are_none"]
    assert others == [[], [], []]
    assert "ranks [0, 1, 2, 3] counted a first batch that fewer than replicas=2" in first[0]


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("replicas", "RankError: replicas=3 does not divide the 4 ranks of the group"),
        ("writer", "RankError: writer=4 is no rank: expected 0 to 3"),
        ("dimension", "distinct=('dp', 'cp') and a mesh with the dimensions ('dp', 'tp')"),
        ("unnamed", "(no names): expected names of the mesh"),
        ("unknown", "ep says nothing of whether its ranks share tokens"),
    ],
)
def test_layouts_that_cannot_be(seen: Seen, name: str, words: str) -> None:
    """Each is refused on all ranks before training starts."""
    for rank in seen["refused_layouts"]:
        assert words in rank[name]


def test_dimension_of_any_name_can_be_named(seen: Seen) -> None:
    """What is not known by its name is accepted when the caller says what it is."""
    assert [rank["named"] for rank in seen["refused_layouts"]] == [1] * 4


def test_group_without_this_rank(seen: Seen) -> None:
    """A group of ranks 0 and 1 is refused on ranks 2 and 3, by name."""
    inside, outside = seen["refused_layouts"][:2], seen["refused_layouts"][2:]
    assert [rank["group"] for rank in inside] == [None, None]
    for rank, refused in zip((2, 3), outside, strict=True):
        assert f"RankError: rank {rank} is not in the group" in refused["group"]


def test_backward_clock_on_one_rank(seen: Seen) -> None:
    """All ranks refuse the window together, so that none waits; nothing of it is lost."""
    for rank in seen["one_backward_clock"]:
        assert "MeterError: the clock ran backwards: -1 s" in rank["refused"]
        assert rank["before"]["total_raw_tokens"] == 0
        assert (rank["record"]["raw_tokens"], rank["record"]["elapsed_s"]) == (32, 2.0)


def test_smaller_step(seen: Seen) -> None:
    """A step back is refused, and the totals stay."""
    for rank in seen["smaller_step"]:
        assert "MeterError: record(step=4) after record(step=5)" in rank["refused"]
        assert (rank["state"]["step"], rank["state"]["total_elapsed_s"]) == (5, 1.0)


def test_ranks_that_close_different_windows(seen: Seen) -> None:
    """A rank that left out a record is found at its next one, on all ranks."""
    for rank in seen["other_steps"]:
        assert "record(step=10) on ranks [0, 1, 2], record(step=20) on ranks [3]" in rank["refused"]
        assert rank["state"]["total_raw_tokens"] == 0


def test_rank_that_never_records(seen: Seen) -> None:
    """The group's time-out ends the wait, and the message says which call is missing."""
    *waited, skipped = seen["one_rank_never_records"]
    assert skipped["refused"] is None
    for rank, found in enumerate(waited):
        waits = f"rank {rank} waits for every rank of the group to call meter.record(step=7)"
        assert f"RankError: {waits}, and the process group gave up" in found["refused"]
        assert "call record on all ranks at the same steps" in found["refused"]
        assert found["seconds"] < 25
        assert found["state"]["total_raw_tokens"] == 0


def test_waiting_is_said_before_the_time_out(seen: Seen) -> None:
    """Long before a group gives up, each rank that waits says for what, once."""
    *waited, skipped = seen["one_rank_never_records"]
    assert skipped["said"] == []
    for rank, found in enumerate(waited):
        (message,) = found["said"]
        assert f"rank {rank} waits for every rank of the group" in message
        assert "meter.record(step=7), and has for a while; call record on all ranks" in message


# --- restarts ------------------------------------------------------------------------------------


def test_resumed_at_another_world_size(seen: Seen) -> None:
    """32 slots of four ranks and 16 of two are 48; the rate is that of the two alone."""
    states = [rank["state"] for rank in seen["resumed_on_two_ranks"]]
    assert states == [states[0]] * 4  # any rank may save it
    for rank in seen["resumed_on_two_ranks"][:2]:
        record = rank["record"]
        assert (record["total_raw_tokens"], record["total_active_tokens"]) == (48, 24)
        assert (record["total_elapsed_s"], record["session"]) == (3.0, 2)
        assert (record["raw_tps"], record["raw_tps_per_device"]) == (16.0, 8.0)


def test_distributed_checkpoint(seen: Seen) -> None:
    """The state comes back from torch.distributed.checkpoint as it was, in the next session."""
    for saved, loaded in seen["distributed_checkpoint"]:
        assert (saved["total_raw_tokens"], saved["session"]) == (32, 1)
        assert loaded == saved | {"session": 2}

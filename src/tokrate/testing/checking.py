"""Check any implementation against the public cases.

count(**batch)      ─┐
meter(clock=...)    ─┼─ check ──► what came out wrong, what was expected, and who reported it
ranks(counts, ...)  ─┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokrate.counting import TokenCounts
from tokrate.testing.case_set import Case, cases

REFUSALS = (ValueError, RuntimeError, AssertionError)
"""What an implementation may raise for a batch that cannot be counted. A TypeError is none: it
says that an argument is not known."""
REFUSAL = "a refusal"
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that an implementation gets wrong."""

    case: Case
    expected: Mapping[str, Any]
    """The fields that came out wrong, as they should be."""
    found: Mapping[str, Any]
    """The same fields, as they were; `error` is an exception that should not have been."""

    @property
    def id(self) -> str:
        """Name of the case."""
        return self.case.id

    @property
    def why(self) -> str:
        """What the case is about."""
        return self.case.why

    @property
    def source(self) -> str:
        """Public report that the case comes from."""
        return self.case.source

    def __str__(self) -> str:
        return (
            f"{self.case}: expected {_listed(self.expected)}; found {_listed(self.found)}\n"
            f"    {self.why} [{self.source}]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `check` found. Printing it shows every failure with its reason and source."""

    passed: tuple[str, ...]
    """Names of the cases that came out right."""
    skipped: tuple[str, ...]
    """Names of the cases that expect none of the `fields` that were asked for."""
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed, and something was checked."""
        return bool(self.passed) and not self.failures

    def raise_for_failures(self) -> None:
        """Do nothing when all is well.

        Raises:
            AssertionError: Something failed, or nothing was checked; the message is the report.
        """
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        counts = f"{len(self.passed)} passed, {len(self.failures)} failed"
        if self.skipped:
            counts += f", {len(self.skipped)} skipped"
        return "\n".join([*map(str, self.failures), counts])


def check(
    *,
    count: Callable[..., Any] | None = None,
    meter: Callable[..., Any] | None = None,
    ranks: Callable[..., Any] | None = None,
    arrays: Callable[[list[Any]], Any] | None = None,
    fields: Collection[str] | None = None,
) -> CheckReport:
    """Run the cases of each kind for which there is an implementation.

    Results may be mappings or objects with attributes. Whole numbers must be equal; rates and
    fractions may differ by a millionth; unknown is None.

    Args:
        count: Called with the arguments of a batch (those of `tokrate.count_tokens` that the case
            has); returns `raw`, `active`, `padded` and `masked`.
        meter: Called with `clock` (returns seconds) and the options of the case; returns an object
            with `add(counts)`, `phase(name)`, `record(step)`, `state_dict()` and
            `load_state_dict(state)`.
        ranks: Called with a list of what each rank counted (`raw`, `active`, `padded`,
            `elapsed_s`) and the layout (`replicas`, `devices`, where it matters `flops_per_token`
            and `peak_flops`); returns the record.
        arrays: Turns the nested lists of a batch into what `count` takes, e.g. `torch.tensor`.
        fields: Look at these fields only, for an implementation that knows no others; `error`
            among them stands for the batches that must be refused.

    Raises:
        TypeError: There is nothing to check.

    >>> report = check(count=lambda labels=None, **rest: {"active": 0}, fields=["active"])
    >>> "fully-masked" in report.passed, report.ok
    (True, False)
    """
    players: list[tuple[Collection[Case], Callable[[Case], Iterator[_Seen]]]] = []
    if count is not None:
        players.append((cases("counting"), lambda case: _play_counting(case, count, arrays)))
    if meter is not None:
        players.append((cases("meter"), lambda case: _Player(case, meter).play()))
    if ranks is not None:
        players.append((cases("ranks"), lambda case: _play_ranks(case, ranks)))
    if not players:
        raise TypeError("check() needs an implementation: pass count=, meter= or ranks=")
    passed, skipped, failures = [], [], []
    for kind, play in players:
        for case in kind:
            if not _asked(_expected_fields(case), fields):
                skipped.append(case.id)
            elif (failure := _judge(case, play, fields)) is not None:
                failures.append(failure)
            else:
                passed.append(case.id)
    return CheckReport(passed=tuple(passed), skipped=tuple(skipped), failures=tuple(failures))


# --- judging -------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """One result of an implementation, next to what it should be."""

    place: str
    expected: Mapping[str, Any]
    found: Any


def _judge(
    case: Case, play: Callable[[Case], Iterator[_Seen]], fields: Collection[str] | None
) -> Failure | None:
    expected: dict[str, Any] = {}
    found: dict[str, Any] = {}
    try:
        for seen in play(case):
            for name in _asked(seen.expected, fields):
                value = _field(seen.found, name)
                if not _same(seen.expected[name], value):
                    expected[seen.place + name] = seen.expected[name]
                    found[seen.place + name] = value
    except Exception as error:  # noqa: BLE001 - whatever somebody's implementation raises
        found["error"] = f"{type(error).__name__}: {error}"
    return Failure(case=case, expected=expected, found=found) if found else None


def _asked(names: Collection[str], fields: Collection[str] | None) -> list[str]:
    """Those of the expected fields that are looked at."""
    return [name for name in names if fields is None or name in fields]


def _expected_fields(case: Case) -> set[str]:
    if "expect" in case.given:
        return set(case.given["expect"])
    return {name for event in _records(case.given["events"]) for name in event[2]}


def _records(events: Sequence[list[Any]]) -> Iterator[list[Any]]:
    for event in events:
        if event[0] == "record":
            yield event
        elif event[0] == "phase":
            yield from _records(event[2])


def _field(found: Any, name: str) -> Any:
    value = found.get(name, ABSENT) if isinstance(found, Mapping) else getattr(found, name, ABSENT)
    return value.item() if hasattr(value, "item") else value  # 0-d arrays and tensors


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, int | float):
        return math.isclose(expected, found, rel_tol=1e-6, abs_tol=1e-12)
    return bool(expected == found)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "no error"


# --- playing -------------------------------------------------------------------------------------


def _play_counting(
    case: Case, count: Callable[..., Any], arrays: Callable[[list[Any]], Any] | None
) -> Iterator[_Seen]:
    batch = {
        name: arrays(value) if arrays is not None and isinstance(value, list) else value
        for name, value in case.given["batch"].items()
    }
    expected = case.given["expect"]
    if "error" not in expected:
        yield _Seen("", expected, count(**batch))
        return
    try:
        outcome = f"none, but {count(**batch)}"
    except REFUSALS:
        outcome = REFUSAL
    yield _Seen("", {"error": REFUSAL}, {"error": outcome})


def _play_ranks(case: Case, ranks: Callable[..., Any]) -> Iterator[_Seen]:
    counts = [dict(rank) for rank in case.given["ranks"]]
    yield _Seen("", case.given["expect"], ranks(counts, **case.given["layout"]))


class _Player:
    """Plays the events of a case on a meter whose clock stands still in between."""

    def __init__(self, case: Case, factory: Callable[..., Any]) -> None:
        self._case = case
        self._factory = factory
        self._now = 0.0
        self._meter = self._make()

    def _make(self) -> Any:
        return self._factory(clock=lambda: self._now, **self._case.given["meter"])

    def play(self) -> Iterator[_Seen]:
        """Every record, next to what it should be."""
        yield from self._play(self._case.given["events"])

    def _play(self, events: Sequence[list[Any]]) -> Iterator[_Seen]:
        for event in events:
            match event:
                case ["add", raw, active, padded]:
                    self._meter.add(TokenCounts(raw, active, padded))
                case ["tick", seconds]:
                    self._now += seconds
                case ["phase", name, inner]:
                    with self._meter.phase(name):
                        yield from self._play(inner)
                case ["restart"]:
                    state = self._meter.state_dict()
                    self._meter = self._make()
                    self._meter.load_state_dict(state)
                case ["record", step, expected]:
                    yield _Seen(f"record({step}).", expected, self._meter.record(step))
                case _:
                    raise ValueError(f"{self._case} has an unknown event {event}")

"""The public case set: hand-worked numbers, most of them from bug reports of other projects.

counting   one batch                        ──► how many of its slots are what
meter      batches, seconds, phases         ──► the records
ranks      what each rank counted           ──► the record of all of them

The cases are JSON files in the folder `cases`, so that programs in any language can read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

Kind = Literal["counting", "meter", "ranks"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hand-worked example."""

    id: str
    """Name of the case, unique in the set."""
    kind: Kind
    """What it is about: one batch, one meter, or the sum over ranks."""
    why: str
    """What goes wrong here, in one line."""
    source: str
    """Public report that it comes from, as `owner/repository#number`; `own` if nobody's."""
    given: Mapping[str, Any]
    """What is put in and what must come out; the `about` of the JSON file says how it is written.
    """

    def __str__(self) -> str:
        return f"{self.kind}/{self.id}"


def cases(kind: Kind | None = None) -> tuple[Case, ...]:
    """The cases of one kind, or all of them.

    Args:
        kind: `"counting"`, `"meter"` or `"ranks"`.

    Raises:
        ValueError: There is no such kind.

    >>> [case.why for case in cases("counting") if case.id == "one-token-row"]
    ['a row of one token has no target when the loss shifts']
    """
    if kind is None:
        return tuple(case for each in KINDS for case in cases(each))
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}, or None for all")
    text = files("tokrate.testing").joinpath("cases", f"{kind}.json").read_text("utf-8")
    return tuple(_case(kind, data) for data in json.loads(text)["cases"])


def _case(kind: Kind, data: dict[str, Any]) -> Case:
    about = {name: data.pop(name) for name in ("id", "why", "source")}
    return Case(kind=kind, given=data, **about)

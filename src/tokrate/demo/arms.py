"""What the demo compares: four ways to feed the same documents to the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tokrate.errors import ConfigError

Layout = Literal["padded", "packed"]
"""How documents are laid into rows: one to a row, or as many as fit."""
Target = Literal["all", "answers"]
"""Which tokens the loss is taken over: all of a document, or its answer only."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to feed the data."""

    name: str
    """What the run is called in every tracker."""
    layout: Layout
    target: Target


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("padded", "padded", "all"),
        Arm("packed", "packed", "all"),
        Arm("masked-prompt", "padded", "answers"),
        # The same as `padded`, on purpose: the gap between the two is the noise of the machine.
        Arm("train-on-all", "padded", "all"),
    )
}
"""All arms by name, in the order in which they are trained by default."""


def check_feed(layout: str, target: str) -> None:
    """Refuse a layout or target that there is not, such as a misspelled one from a config file.

    Raises:
        ConfigError: It is neither of the two.
    """
    for what, found, known in (("layout", layout, Layout), ("target", target, Target)):
        choices = get_args(known)
        if found not in choices:
            raise ConfigError(f"{what}: found {found!r}; expected {' or '.join(choices)}")


def choose_arms(names: Sequence[str]) -> list[Arm]:
    """The arms of these names, in this order.

    Raises:
        ConfigError: A name is unknown or comes twice, or there is none.
    """
    if isinstance(names, str):
        names = [names]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        found = ", ".join(map(repr, unknown)) or "none"
        raise ConfigError(f"arms: found {found}; expected one or more of {', '.join(ARMS)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"arms: found {', '.join(names)}; expected each arm once")
    return [ARMS[name] for name in names]

"""Says in words what a comparison found: how much, whether it is more than noise, and why."""

from __future__ import annotations

import math

from tokrate.compare.factors import Factor, Ratio
from tokrate.compare.result import RunResult

NOTHING = 1e-3
"""A factor nearer to 1 than this explains nothing, whatever its interval says."""
WORTH_A_WORD = math.log(1.03)
HALF = 0.5
"""A cause with less than this share of the difference is named with the next one."""

WHAT = {
    "active_tps": "active tokens per second",
    "active_tps_per_device": "active tokens per second and device",
    "raw_tps": "slots per second (active tokens are unknown)",
    "raw_tps_per_device": "slots per second and device (active tokens are unknown)",
}
CAUSES = {
    "raw": ("the machine works slower", "the machine works faster"),
    "unpadded": ("more of it is padding", "less of it is padding"),
    "unmasked": (
        "fewer of the real tokens enter the loss",
        "more of the real tokens enter the loss",
    ),
    "active_share": (
        "fewer of the slots enter the loss",
        "more of the slots enter the loss",
    ),
    "busy": ("the machine works slower", "the machine works faster"),
    "fed": ("it waits more for data", "it waits less for data"),
}


def sentence(run: RunResult, reference: RunResult) -> str:
    """One sentence on a run against the reference."""
    versus = run.versus
    if versus is None:
        return f"{run.label} and {reference.label} have no number in common to compare."
    span = "" if versus.low is None else f" (95 % interval {versus.low:.3f} to {versus.high:.3f})"
    if versus.shows_difference is False:
        return (
            f"{run.label} and {reference.label}: no difference that these windows can show, "
            f"ratio {versus.ratio:.3f}{span}{_inside(versus)}."
        )
    return (
        f"{run.label} has {versus.ratio:.3f} times the {WHAT[versus.of]} of "
        f"{reference.label}{span}{_because(versus)}."
    )


def packing(run: RunResult) -> str | None:
    """What perfect packing could give; None where there is next to no padding."""
    if run.best_packing is None or run.best_packing < math.exp(WORTH_A_WORD):
        return None
    return (
        f"{run.label}: {run.padded_frac:.1%} of its slots are padding; perfect packing could give "
        f"at most {run.best_packing:.2f} times its active tokens per second."
    )


def causes(versus: Ratio) -> list[Factor]:
    """The factors that say something, the largest first; raw as its two parts where it has them."""
    split = versus.split if _weight_of(versus.split) > NOTHING else ()
    found = [f for f in versus.factors if f.name != "raw" or not split] + list(split)
    found = [f for f in found if abs(math.log(f.ratio)) > NOTHING]
    return sorted(found, key=lambda f: -abs(math.log(f.ratio)))


def _weight_of(split: tuple[Factor, ...]) -> float:
    """How much the waiting for data explains."""
    return next((abs(math.log(f.ratio)) for f in split if f.name == "fed"), 0.0)


def _because(versus: Ratio) -> str:
    found = causes(versus)
    if not found:
        return ""
    whole = math.log(versus.ratio)
    helping = [f for f in found if math.log(f.ratio) * whole > 0] or found
    named = helping[:1]
    if len(helping) > 1 and math.log(named[0].ratio) / whole < HALF:
        named = helping[:2]
    text = ", mainly because " + " and ".join(_cause(f) for f in named)
    against = [f for f in found if math.log(f.ratio) * whole < 0]
    if against and abs(math.log(against[0].ratio)) > WORTH_A_WORD:
        text += f"; against that, {_cause(against[0])}"
    return text


def _inside(versus: Ratio) -> str:
    """Causes that show although they cancel each other out."""
    found = [f for f in causes(versus) if f.shows and abs(math.log(f.ratio)) > WORTH_A_WORD]
    return f"; but {', and '.join(_cause(f) for f in found[:2])}" if found else ""


def _cause(factor: Factor) -> str:
    return f"{CAUSES[factor.name][factor.ratio > 1]} (×{factor.ratio:.3f})"

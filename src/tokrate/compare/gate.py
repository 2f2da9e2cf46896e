"""The performance gate: which runs are too slow, and surely so."""

from __future__ import annotations

from tokrate.compare.result import Comparison
from tokrate.errors import CompareError


def check_gate(found: Comparison, limit: float) -> tuple[str, ...]:
    """What to say of each run that is below the limit; empty when all is well.

    A run is below when its ratio to the reference is, and the whole interval lies below 1: a
    difference that noise can make fails nobody.

    Args:
        found: The comparison.
        limit: Smallest ratio that passes.

    Raises:
        CompareError: A run cannot be judged, so that silence would be a lie.
    """
    if len(found.runs) < 2:
        raise CompareError(
            f"--fail-below: only one run was found ({found.reference}); expected two or more"
        )
    slow = []
    for run in found.runs[1:]:
        versus = run.versus
        if versus is None or versus.high is None:
            raise CompareError(
                f"--fail-below: {run.label} cannot be judged against {found.reference}: expected "
                "two steady windows or more of both, with a number in common"
            )
        if versus.ratio < limit and versus.high < 1:
            slow.append(
                f"{run.label} is too slow: {versus.ratio:.3f} times {found.reference} "
                f"({versus.low:.3f} to {versus.high:.3f}), the limit is {limit:g}"
            )
    return tuple(slow)

"""Reads runs back from journals and trackers, and says which is faster, and why.

    sources ──► Series ──► Run (one for each id) ──► Steady ──► Ratio, factors ──► report
                (one shape)   same                    steady     factors, doubts, words

Loads numpy and msgspec, so `import tokrate` does not import it.
"""

from tokrate.compare.comparison import compare_runs, list_runs, read_runs
from tokrate.compare.factors import Factor, Ratio
from tokrate.compare.result import Comparison, Doubt, RunResult

__all__ = [
    "Comparison",
    "Doubt",
    "Factor",
    "Ratio",
    "RunResult",
    "compare_runs",
    "list_runs",
    "read_runs",
]

"""For tests: the suite for backends, a backend in memory, and the public cases for the numbers."""

from tokrate.testing.case_set import Case, cases
from tokrate.testing.checking import CheckReport, Failure, check
from tokrate.testing.conformance import BackendConformance
from tokrate.testing.memory import MemoryBackend

__all__ = [
    "BackendConformance",
    "Case",
    "CheckReport",
    "Failure",
    "MemoryBackend",
    "cases",
    "check",
]

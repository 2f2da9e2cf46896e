"""Every error that tokrate raises on purpose.

    TokrateError
    ├── CountingError        a batch contradicts itself, or says too little to count
    ├── MeterError           the meter was called in an order that gives no honest number
    │   └── StateError       a saved meter state that cannot be loaded
    ├── RankError            the ranks do not fit the layout that was declared
    ├── MetricNameError      a metric name that some tracker would reject, or that collides
    ├── ValueRefused         a value or step that is no number (only raised with strict=True)
    ├── ConfigError          the `logger` key, or an argument of open_logger
    │   ├── UnknownBackendError      no backend of that name
    │   ├── AmbiguousBackendError    several packages claim the name
    │   ├── MissingPackageError      the backend's package is not installed
    │   ├── BrokenBackendError       it is installed and fails to import
    │   └── UnknownOptionError       the backend takes no such option
    ├── RunFolderError       the run's folder cannot be used
    ├── JournalError         a journal that cannot be read or opened
    ├── CompareError         runs that cannot be read back, or not be compared
    └── BackendError         a tracker failed (never reaches the training loop)

A message says what was found, what was expected and what to do.
"""

from __future__ import annotations


class TokrateError(Exception):
    """Base of every error that tokrate raises on purpose."""


class CountingError(TokrateError, ValueError):
    """A batch contradicts itself, or says too little to be counted."""


class MeterError(TokrateError, ValueError):
    """The meter was called in an order that gives no honest number."""


class StateError(MeterError):
    """A saved meter state that this version cannot load."""


class RankError(TokrateError, ValueError):
    """The ranks do not fit the layout that was declared."""


class MetricNameError(TokrateError, ValueError):
    """A metric name that some tracker would reject, or that collides with another."""


class ValueRefused(TokrateError, TypeError):
    """A value or step that is no number; raised only with `strict=True`."""


class ConfigError(TokrateError, ValueError):
    """The `logger` key or an argument of `open_logger` is wrong; raised before training starts."""


class UnknownBackendError(ConfigError):
    """No backend of that name is known."""


class AmbiguousBackendError(ConfigError):
    """Several installed packages claim the same backend name."""


class MissingPackageError(ConfigError):
    """The package that a backend writes to is not installed."""


class BrokenBackendError(ConfigError):
    """A backend is installed but fails to import."""


class UnknownOptionError(ConfigError):
    """A backend was given an option that it does not take."""


class RunFolderError(TokrateError, OSError):
    """The run's folder cannot be created, written or told apart from another's."""


class JournalError(TokrateError):
    """A journal that cannot be opened or read."""


class CompareError(TokrateError, ValueError):
    """Runs that cannot be read back from where they were written, or not be compared."""


class BackendError(TokrateError):
    """A tracker refused or failed; delivery keeps what is waiting and never lets this out.

    Args:
        message: What failed, in the user's terms.
        retryable: True when the same call may succeed later (an outage), False when it never
            will (a rejected value, a wrong account).
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable

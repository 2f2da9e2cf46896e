"""The `logger` key in every form that people write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tokrate.errors import ConfigError

EXPECTED = (
    "a backend's name ('tensorboard'), a list of names, a mapping of name to options "
    "({'wandb': {'project': ...}}), or 'none'"
)


@dataclasses.dataclass(frozen=True, slots=True)
class BackendChoice:
    """One backend that the `logger` key asks for."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: bool = False
    """Whether its absence at start-up is an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoggerChoice:
    """All that the `logger` key says."""

    backends: tuple[BackendChoice, ...] = ()
    console: bool = True
    """False when the key says `console: false`."""


def parse_logger(spec: Any) -> LoggerChoice:
    """Read the `logger` key.

    Args:
        spec: `"wandb"`, `["tensorboard", "wandb"]`, `{"mlflow": {"experiment": "alpaca"}}`,
            `"none"`, or an OmegaConf node of one of these. The console is on unless
            `{"console": False}` says otherwise.

    Raises:
        ConfigError: Any other form, or a backend that is named twice.

    >>> [choice.name for choice in parse_logger(["tensorboard", "wandb"]).backends]
    ['tensorboard', 'wandb']
    """
    pairs = _pairs(spec)
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"logger names {', '.join(twice)} twice: expected each backend once")
    off = [options for name, options in pairs if name == "console" and options is False]
    chosen = [_choice(*pair) for pair in pairs if not (off and pair[0] == "console")]
    return LoggerChoice(tuple(chosen), console=not off)


def _pairs(spec: Any) -> list[tuple[str, Any]]:
    """The key as pairs of name and options, whichever way it was written."""
    if spec is None or spec == "none":
        return []
    if isinstance(spec, str):
        return [(spec, None)]
    if isinstance(spec, Mapping):
        return [(_name(name), options) for name, options in spec.items()]
    if isinstance(spec, Sequence):
        if "none" in list(spec) and len(spec) > 1:
            raise ConfigError(f"logger={list(spec)!r}: 'none' stands alone; leave it out")
        return [pair for item in spec for pair in _pairs(item)]
    raise ConfigError(f"logger={spec!r} ({type(spec).__name__}): expected {EXPECTED}")


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"logger names {name!r} as a backend: expected {EXPECTED}")
    return name


def _choice(name: str, options: Any) -> BackendChoice:
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"logger: {name}: {options!r}: expected a mapping of options "
            f"({{{name}: {{option: value}}}}), or nothing; to leave a backend out, do not name it"
        )
    options = _unwrapped(options)
    required = options.pop("required", False)
    if not isinstance(required, bool):
        raise ConfigError(f"logger: {name}: required: {required!r}: expected true or false")
    return BackendChoice(_name(name), options, required)


def _unwrapped(value: Any) -> Any:
    """Dicts and lists instead of configuration nodes; what they hold stays the object it is."""
    if isinstance(value, Mapping):
        return {str(key): _unwrapped(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
        return [_unwrapped(item) for item in value]
    return value

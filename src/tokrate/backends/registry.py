"""Finds the backend of a name: built in, from an installed plug-in, or by a dotted path.

    "wandb"                      the table below
    "graphite"                   an entry point of the group `tokrate.backends`
    "my_pkg.backends:Graphite"   a module and an attribute

No tracker is imported here, so a mistake in the `logger` key is told in milliseconds.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from tokrate.backends.base import BackendFactory
from tokrate.errors import (
    AmbiguousBackendError,
    BrokenBackendError,
    ConfigError,
    MissingPackageError,
    UnknownBackendError,
    UnknownOptionError,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "tokrate.backends"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A backend that ships with tokrate."""

    factory: str
    """Where it is, as `module:attribute`."""
    package: str
    """The package that it writes to, by its import name."""
    extra: str | None
    """The extra of tokrate that installs the package; None when tokrate itself needs it."""


BUILT_INS: Mapping[str, BuiltIn] = {
    "console": BuiltIn("tokrate.backends._console:ConsoleBackend", "rich", None),
    "tensorboard": BuiltIn(
        "tokrate.backends._tensorboard:TensorBoardBackend", "tensorboard", "tensorboard"
    ),
    "mlflow": BuiltIn("tokrate.backends._mlflow:MLflowBackend", "mlflow", "mlflow"),
    "wandb": BuiltIn("tokrate.backends._wandb:WandbBackend", "wandb", "wandb"),
}


def find_backend(name: str) -> BackendFactory:
    """The factory of the backend called `name`.

    Args:
        name: A built-in's name, an entry point's name, or a dotted path `package.module:attribute`.

    Raises:
        UnknownBackendError: nothing has that name.
        AmbiguousBackendError: several packages claim it.
        MissingPackageError: a built-in's tracker is not installed.
        BrokenBackendError: it is installed, and importing it fails.
    """
    if ":" in name:
        return _load(name, f"the dotted path {name!r}", _imported)
    claims = _claims(name)
    if len(claims) + (name in BUILT_INS) > 1:
        raise AmbiguousBackendError(_ambiguous(name, claims))
    if name in BUILT_INS:
        return _built_in(name)
    if claims:
        point = claims[0]
        return _load(name, _origin(point), lambda _: point.load())
    raise UnknownBackendError(_unknown(name))


def known_backends() -> dict[str, str]:
    """Every name that `find_backend` knows, and where each comes from."""
    known = dict.fromkeys(BUILT_INS, "built in")
    for point in _points():
        also = f"{known[point.name]}, " if point.name in known else ""
        known[point.name] = f"{also}{_origin(point)}"
    return known


def check_options(name: str, factory: BackendFactory, options: Mapping[str, Any]) -> None:
    """Refuse options that the factory does not take, and miss none that it needs.

    Raises:
        UnknownOptionError: an option that the factory's signature does not name.
        ConfigError: an option without a default is not given.
    """
    takes = list(inspect.signature(factory).parameters.values())[1:]
    if not any(p.kind is p.VAR_KEYWORD for p in takes):
        accepted = [p.name for p in takes if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        for option in options:
            if option not in accepted:
                raise UnknownOptionError(_unknown_option(name, str(option), accepted))
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p.name for p in takes if p.default is p.empty and p.kind not in fixed]
    missing = [option for option in needed if option not in options]
    if missing:
        raise ConfigError(
            f"backend {name!r} needs the option{'s' * (len(missing) > 1)} "
            f"{_listed(missing)}: write logger: {{{name}: {{{missing[0]}: ...}}}}"
        )


def _built_in(name: str) -> BackendFactory:
    entry = BUILT_INS[name]
    if not is_installed(entry.package):
        target = f"tokrate[{entry.extra}]" if entry.extra else entry.package
        raise MissingPackageError(
            f"backend {name!r} writes to the package {entry.package!r}, which is not installed: "
            f"run  pip install '{target}'"
        )
    return _load(entry.factory, "tokrate itself", _imported)


def is_installed(package: str) -> bool:
    """Whether a package of that import name is installed (it is not imported).

    A mere folder of that name does not count: W&B leaves a folder `wandb/` in the working
    directory, which Python would take for a package without an `__init__.py`.
    """
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = PathFinder.find_spec(package)
    return spec is not None and spec.origin is not None


def _load(name: str, origin: str, load: Any) -> BackendFactory:
    """Import a factory; whatever goes wrong is told as the backend's own failure."""
    try:
        factory = load(name)
    except ConfigError:
        raise
    except Exception as error:
        raise BrokenBackendError(
            f"backend {name!r} from {origin} fails to import: {type(error).__name__}: {error}. "
            f"Mend or reinstall that package, or take another backend"
        ) from error
    if not callable(factory):
        raise BrokenBackendError(
            f"backend {name!r} from {origin} is a {type(factory).__name__}; expected something "
            f"to call as factory(run, **options)"
        )
    return cast("BackendFactory", factory)


def _imported(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or not is_path(module_name):
        raise UnknownBackendError(
            f"{path!r} is no dotted path: expected package.module:attribute, such as "
            f"my_pkg.backends:GraphiteBackend"
        )
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # Only when the named module itself is missing; what it imports in vain is its own fault.
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise UnknownBackendError(
                f"{path!r}: there is no module {error.name!r}; check the spelling, and that it is "
                f"installed or on the PYTHONPATH"
            ) from error
        raise
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = _close(part, dir(found))
            hint = f"; did you mean {close!r}?" if close else ""
            raise UnknownBackendError(f"{path!r}: {module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def is_path(name: str) -> bool:
    """Whether the text could name a module: identifiers joined by dots."""
    return all(part.isidentifier() for part in name.split("."))


def _claims(name: str) -> list[EntryPoint]:
    """The entry points of that name; one that nobody has may have been installed just now."""
    found = [point for point in _points() if point.name == name]
    if not found and name not in BUILT_INS:
        _points_on.cache_clear()
        found = [point for point in _points() if point.name == name]
    return found


def _points() -> Sequence[EntryPoint]:
    """The entry points of our group, one for each distribution that declares it."""
    return _points_on(tuple(sys.path))


@lru_cache(maxsize=1)
def _points_on(path: Sequence[str]) -> Sequence[EntryPoint]:
    """What `_points` returns; kept, since looking into each installed package takes milliseconds.

    The same distribution is often seen twice (an editable install, a path twice on sys.path).
    """
    from importlib.metadata import entry_points  # not at import: `import tokrate` stays light

    seen: dict[tuple[str, str, str], EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        seen.setdefault((point.name, point.value, _origin(point)), point)
    return sorted(seen.values(), key=lambda point: (point.name, _origin(point)))


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _ambiguous(name: str, claims: Iterable[EntryPoint]) -> str:
    owners = ["tokrate itself"] if name in BUILT_INS else []
    values = [f"{_origin(point)} ({point.value})" for point in claims]
    first = next(iter(claims)).value
    return (
        f"several packages claim the backend name {name!r}: {', '.join(owners + values)}. "
        f"Uninstall all but one, or name the one you mean by its dotted path, such as {first!r}"
    )


def _unknown(name: str) -> str:
    known = known_backends()
    close = _close(name.lower(), known)
    hint = f" Did you mean {close!r}?" if close else ""
    return (
        f"no backend is called {name!r}.{hint} Known: {_listed(known)}. Any other one is named by "
        f"its dotted path, package.module:attribute"
    )


def _unknown_option(name: str, option: str, accepted: list[str]) -> str:
    close = _close(option, accepted)
    hint = f" Did you mean {close!r}?" if close else ""
    takes = f"It takes: {_listed(accepted)}" if accepted else "It takes no options"
    return f"backend {name!r} has no option {option!r}.{hint} {takes}"


def _close(word: str, known: Iterable[str]) -> str | None:
    """What was probably meant."""
    from difflib import get_close_matches  # not at import: `import tokrate` stays light

    return next(iter(get_close_matches(word, list(known), n=1)), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)

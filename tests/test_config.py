"""The `logger` key, in every form that people write it."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from tokrate.config import BackendChoice, LoggerChoice, parse_logger
from tokrate.errors import ConfigError

TENSORBOARD = BackendChoice("tensorboard")
FORMS = [
    ("tensorboard", [TENSORBOARD]),
    (["tensorboard", "wandb"], [TENSORBOARD, BackendChoice("wandb")]),
    (
        {"mlflow": {"experiment": "a"}, "wandb": None},
        [BackendChoice("mlflow", {"experiment": "a"}), BackendChoice("wandb")],
    ),
    (
        ["tensorboard", {"wandb": {"project": "p", "required": True}}],
        [TENSORBOARD, BackendChoice("wandb", {"project": "p"}, required=True)],
    ),
    ({"my.pkg:Backend": {"host": "h"}}, [BackendChoice("my.pkg:Backend", {"host": "h"})]),
    ("none", []),
    (["none"], []),
    (None, []),
    ([], []),
]


@pytest.mark.parametrize(("spec", "backends"), FORMS)
def test_forms(spec: Any, backends: list[BackendChoice]) -> None:
    """A name, a list, a mapping with options, a mixture, or nothing."""
    assert parse_logger(spec) == LoggerChoice(tuple(backends))


@pytest.mark.parametrize(("spec", "backends"), FORMS)
def test_omegaconf_forms(spec: Any, backends: list[BackendChoice]) -> None:
    """An OmegaConf node is the mapping or list that it stands for; options become plain."""
    node = OmegaConf.create({"project": "p", "logger": spec})
    choice = parse_logger(node.logger)
    assert choice == LoggerChoice(tuple(backends))
    assert all(type(backend.options) is dict for backend in choice.backends)


def test_interpolations_are_resolved() -> None:
    """An option may point at another key of the configuration."""
    node = OmegaConf.create({"name": "x", "logger": {"wandb": {"project": "${name}"}}})
    assert parse_logger(node.logger).backends[0].options == {"project": "x"}


def test_console_can_be_switched_off() -> None:
    """The console is on unless the key says `console: false`."""
    assert parse_logger({"console": False}) == LoggerChoice((), console=False)
    assert parse_logger({"console": {"live": False}}).backends[0].options == {"live": False}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (3, "expected a backend's name"),
        (["wandb", "wandb"], "twice"),
        (["wandb", {"wandb": {}}], "twice"),
        (["none", "wandb"], "stands alone"),
        ({"wandb": True}, "mapping of options"),
        ({"wandb": False}, "do not name it"),
        ({"wandb": "project"}, "mapping of options"),
        ({"wandb": {"required": "yes"}}, "true or false"),
        ({3: {}}, "expected a backend's name"),
        ("", "expected a backend's name"),
    ],
)
def test_refused_forms(spec: Any, words: str) -> None:
    """Anything else says what was found and what was expected."""
    with pytest.raises(ConfigError, match=words):
        parse_logger(spec)


def test_options_keep_their_objects() -> None:
    """An option may be any object, such as a client that is connected already."""
    client = object()
    spec = {"my.pkg:Backend": {"client": client, "hosts": OmegaConf.create(["a"])}}
    options = parse_logger(spec).backends[0].options
    assert options["client"] is client
    assert type(options["hosts"]) is list

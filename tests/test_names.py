"""Names: one alphabet, no collisions, and the legal form of names from outside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokrate.errors import ConfigError, MetricNameError
from tokrate.names import (
    ALIASES,
    ALL,
    LEGAL_NAME,
    MAX_LENGTH,
    STANDARD,
    MetricNames,
    NameGate,
    check_name,
    legal_name,
    parse_aliases,
)


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("eval/acc@5", "eval/acc_5"),
        ("Loss", "loss"),
        ("train/Loss (mean)", "train/loss_mean"),
        ("a/b/c", "a/b_c"),
        ("/lead//trail/", "lead/trail"),
        ("throughput(tps)", "throughput_tps"),
        ("mfu(%)", "mfu"),
        ("_hidden", "hidden"),
        ("größe", "grosse"),
        ("", "unnamed"),
        ("///", "unnamed"),
        ("a.b:c d-e", "a_b_c_d_e"),
    ],
)
def test_suggested_form(name: str, legal: str) -> None:
    """An illegal name is refused where it is declared, and its legal form is suggested."""
    assert legal_name(name) == legal
    with pytest.raises(MetricNameError, match=legal):
        check_name(name)


@given(st.text(max_size=300))
def test_suggestions_are_legal(name: str) -> None:
    """Whatever the name, the suggestion passes, and a legal suggestion is kept as it is."""
    legal = legal_name(name)
    assert LEGAL_NAME.fullmatch(legal)
    assert len(legal) <= MAX_LENGTH
    assert NameGate().admit(legal) == legal


@pytest.mark.parametrize("names", [["a", "a"], ["loss", "loss/train"], ["loss/train", "loss"]])
def test_declared_collisions(names: list[str]) -> None:
    """Equal names and path prefixes collide in some tracker, so they are refused."""
    with pytest.raises(MetricNameError, match="collides"):
        NameGate().declare(names)


def test_admitted_names() -> None:
    """A running loop gets the legal form, the same each time, and None where it would collide."""
    gate = NameGate()
    assert gate.admit("eval/acc@5") == gate.admit("eval/acc@5") == "eval/acc_5"
    assert gate.admit("eval/acc#5") is None
    assert gate.admit("eval/acc_5") is None
    assert gate.admit("eval") is None
    assert gate.admit("x" * 300) == "x" * MAX_LENGTH


def test_name_of_a_slashless_parent() -> None:
    """`loss` after `loss` is the same metric; `loss/a` after `loss` would need a folder."""
    gate = NameGate()
    assert gate.admit("loss") == "loss"
    assert gate.admit("loss") == "loss"
    assert gate.admit("loss/a") is None


def test_records_keys_are_reserved() -> None:
    """All keys of the record are legal and collide with nothing, aliases included."""
    for framework in ALIASES:
        gate = NameGate()
        names = MetricNames(aliases=parse_aliases(framework), metrics="all")
        gate.declare(key for key, _ in names.columns)
    assert set(STANDARD) < set(ALL)


def test_all_aliases_together() -> None:
    """The tables of all frameworks can be asked for at once."""
    assert len(parse_aliases(list(ALIASES))) == sum(len(table) for table in ALIASES.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix": "Tok Rate"}, "tok_rate"),
        ({"prefix": "a/b"}, "a_b"),
        ({"metrics": "everything"}, "'standard'"),
        ({"aliases": {"throughput/raw_tps": "raw_tps"}}, "collides"),
        ({"aliases": {"throughput": "raw_tps"}}, "collides"),
    ],
)
def test_declarations_that_are_refused(options: dict[str, object], words: str) -> None:
    """A prefix, a choice or an alias that cannot be is an error before training starts."""
    with pytest.raises((ConfigError, MetricNameError), match=words):
        MetricNames(**options)


@pytest.mark.parametrize("aliases", ["megatron", ["torchtune", "x"], {"tps": "speed"}])
def test_unknown_aliases(aliases: object) -> None:
    """An unknown framework or field names those that are known."""
    with pytest.raises(ConfigError, match=r"torchtune|active_tps"):
        parse_aliases(aliases)


def test_illegal_alias() -> None:
    """An alias of the user's passes the same gate."""
    with pytest.raises(MetricNameError, match="tokens_s"):
        parse_aliases({"tokens(s)": "raw_tps"})

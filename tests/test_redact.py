"""Secrets in configurations, URLs and messages never leave the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokrate import RunInfo, open_logger
from tokrate.errors import BackendError, ConfigError
from tokrate.redact import names_a_secret, redact, redact_text
from tokrate.sync import sync_run


@pytest.mark.parametrize(
    "key",
    [
        *(
            "api_key",
            "apiKey",
            "API-KEY",
            "wandb_api_key",
            "OPENAI_API_KEY",
            "aws_secret_access_key",
        ),
        *("token", "hf_token", "hub_token", "push_to_hub_token", "access_token", "githubToken"),
        *("password", "db.password", "passwd", "PASSPHRASE", "client_secret", "credentials"),
        *("Authorization", "private_key", "connection_string", "tokens"),
    ],
)
def test_keys_of_secrets(key: str) -> None:
    """Whatever its spelling, a key that names a secret is known."""
    assert names_a_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        *("pad_token", "eos_token", "bos_token_id", "max_tokens", "tokenizer", "num_tokens"),
        *("token_type_ids", "n_tokens_per_batch", "key", "keys", "monkey", "secretary", "author"),
        *("passes", "forward_pass", "attention_key_dim", "image_token", "compass", "author_name"),
    ],
)
def test_keys_of_language_models(key: str) -> None:
    """What people who train language models call a token, or a key, is no secret."""
    assert not names_a_secret(key)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgresql://me:pw@host/db", "postgresql://me:***@host/db"),
        ("mysql+pymysql://u:p%40@h:3306/x", "mysql+pymysql://u:***@h:3306/x"),
        ("https://h/x?token=abc&step=3", "https://h/x?token=***&step=3"),
        ("Server=h;Password=geheim;x=1", "Server=h;Password=***;x=1"),
        ("login with hf_abcdefghijklmnopqrst failed", "login with *** failed"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("lr=0.1 batch=16", "lr=0.1 batch=16"),
    ],
)
def test_secrets_in_texts(text: str, clean: str) -> None:
    """Passwords in URLs, secret query values and the shapes of well-known tokens are hidden."""
    assert redact_text(text) == clean


def test_nested_configurations() -> None:
    """Secrets are found at any depth; everything else is as it was."""
    config = {"lr": 0.1, "hub": {"hf_token": "x", "urls": ["ftp://a:b@c"]}, "api_key": None}
    assert redact(config) == {
        "lr": 0.1,
        "hub": {"hf_token": "***", "urls": ["ftp://a:***@c"]},
        "api_key": None,
    }
    assert redact({"my_pin": "1"}, ["pin"]) == {"my_pin": "***"}


@given(
    st.recursive(st.integers() | st.text(), lambda v: st.dictionaries(st.text(), v), max_leaves=9)
)
def test_redacting_twice_is_redacting_once(value: object) -> None:
    """What was hidden stays hidden, and nothing else changes on the way."""
    assert redact(redact(value)) == redact(value)


def test_no_secret_reaches_journal_tracker_or_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the configuration nor an option nor a tracker's own message shows a secret."""
    spec = {
        "console": False,
        "toys:Chatty": {"out": str(tmp_path / "out"), "uri": "https://me:geheim@host"},
    }
    run = RunInfo("a", config={"api_key": "geheim", "my_pin": "geheim"})
    logger = open_logger(spec, run=run, dir=tmp_path, redact_keys=["pin"], close_timeout_s=0.1)
    logger.close()
    written = (tmp_path / "a" / "journal.jsonl").read_text() + (tmp_path / "out").read_text()
    assert "geheim" not in written + caplog.text
    assert json.loads((tmp_path / "out").read_text()) == {"api_key": "***", "my_pin": "***"}
    assert "me:***@host" in caplog.text
    with pytest.raises(ConfigError, match="pass the options again"):
        sync_run(tmp_path / "a")
    spec["toys:Chatty"]["required"] = True
    with pytest.raises(BackendError) as caught:
        open_logger(spec, run=RunInfo("b"), dir=tmp_path)
    assert "geheim" not in str(caught.value)
    assert caught.value.__cause__ is None

"""Secrets stay out of the journal, the trackers and the log: what looks like one becomes `***`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"

SECRET_WORDS = (
    "api_key",
    "apikey",
    "access_key",
    "account_key",
    "private_key",
    "secret_key",
    "signing_key",
    "encryption_key",
    "ssh_key",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "credential",
    "credentials",
    "authorization",
    "bearer",
    "cookie",
    "connection_string",
)
"""A key that holds one of these, between word boundaries or underscores, names a secret."""

OWNERS = (
    "access|api|app|auth|azure|bearer|bot|csrf|databricks|deploy|git|github|gitlab|hf|hub|"
    "huggingface|hugging_face|id|jwt|login|mlflow|oauth|push_to_hub|read|refresh|sas|secret|"
    "security|service|session|slack|tracking|user|wandb|write"
)
"""`token` names a secret alone or behind one of these: `pad_token` and `max_tokens` do not."""

_KEY = re.compile(rf"(^|_)({'|'.join(SECRET_WORDS)})s?(_|$)|(^|_)({OWNERS})_?tokens?$|^tokens?$")
_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_URL_LOGIN = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)(?P<user>[^\s/:@]*):(?P<word>[^\s/@]+)@")
_QUERY = re.compile(r"(?P<key>[\w.-]+)=(?P<value>[^\s&#;,'\"]+)")
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w-]{16,}|"
    r"AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)


def names_a_secret(key: str, extra: Iterable[str] = ()) -> bool:
    """Whether a configuration key looks as if its value were a secret.

    Args:
        key: Any spelling: `api_key`, `apiKey`, `API-KEY`.
        extra: Further words that name a secret.

    >>> [names_a_secret(key) for key in ("wandbApiKey", "hf_token", "pad_token", "max_tokens")]
    [True, True, False, False]
    """
    word = _WORD_BREAK.sub("_", key).lower().strip("_")
    return bool(_KEY.search(word)) or any(_WORD_BREAK.sub("_", e).lower() in word for e in extra)


def redact_text(text: str, extra: Iterable[str] = ()) -> str:
    """The text without passwords in URLs, secret query values and well-known token shapes.

    >>> redact_text("postgresql://me:pw@host/db?api_key=1&x=2")
    'postgresql://me:***@host/db?api_key=***&x=2'
    """
    text = _URL_LOGIN.sub(rf"\g<scheme>\g<user>:{HIDDEN}@", text)
    if "=" in text:
        text = _QUERY.sub(
            lambda m: f"{m['key']}={HIDDEN}" if names_a_secret(m["key"], extra) else m[0], text
        )
    return _SHAPES.sub(HIDDEN, text)


def redact(value: Any, extra: Iterable[str] = ()) -> Any:
    """Plain values (see `tokrate.config.plain`) with every secret in them hidden."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if item is not None and item != "" and names_a_secret(key, extra)
            else redact(item, extra)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item, extra) for item in value]
    return redact_text(value, extra) if isinstance(value, str) else value

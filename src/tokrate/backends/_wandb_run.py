"""The W&B run that rows go to: the user's active run, or one that we create.

wandb.run is active            joined: its settings and its end stay with whoever started it
otherwise                      created, beside any others (`reinit="create_new"`)
nobody is logged in            created offline, in the run's folder
"""

from __future__ import annotations

import logging
import netrc
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokrate.plain import plain
from tokrate.run import RunInfo

FLUSH_S = 1.0
"""How often W&B's service writes its file, in seconds; a killed service loses what is younger."""
FINISH_TIMEOUT_S = 10.0
LONGEST_TAG = 64

_log = logging.getLogger("tokrate.backends.wandb")
_one_at_a_time = threading.Lock()
_ours: dict[int, Any] = {}
"""Runs that we have started and not let go, by identity."""


def active_run() -> Any:
    """The run that the user, or a framework, has started in this process; None if there is none."""
    return getattr(sys.modules.get("wandb"), "run", None)


def start_run(
    info: RunInfo, texts: Mapping[str, str | None], mode: str | None, init_timeout_s: float
) -> Any:
    """Create the run, or go on with it where it exists already.

    Args:
        info: The run that is written.
        texts: Project, entity, group, job type and notes, by W&B's names for them.
        mode: `online`, `offline`, or None for W&B's own setting.
        init_timeout_s: Limit for reaching the server, in seconds.
    """
    with _one_at_a_time:
        try:
            run = _init(info, texts, mode, init_timeout_s)
        except Exception as error:
            if not is_service_lost(error):
                raise
            # Its death goes unnoticed until somebody wants something: once more, with a new one.
            run = _init(info, texts, mode, init_timeout_s)
        _ours[id(run)] = run
        _hide(run)
        return run


def let_go(run: Any) -> None:
    """Forget a run that was finished, or whose service has died."""
    _ours.pop(id(run), None)


def _hide(run: Any) -> None:
    """Take our run from the list out of which `wandb.init` serves the user.

    By default it returns the newest run of the process instead of a new one, and with
    `reinit="finish_previous"` it ends them all: both are meant for the user's own.
    """
    from wandb.sdk import wandb_setup

    with suppress(AttributeError):  # no public name, and an older W&B has no such list
        wandb_setup.singleton().remove_active_run(run)


def _init(
    info: RunInfo, texts: Mapping[str, str | None], mode: str | None, init_timeout_s: float
) -> Any:
    import wandb

    mode = mode or _default_mode(wandb.setup().settings)
    options: dict[str, Any] = {
        **texts,
        "id": info.id,
        "name": info.name,
        "dir": str(info.folder),
        "tags": list(dict.fromkeys(tag[:LONGEST_TAG] for tag in info.tags if tag)),
        "config": plain(info.config or {}),
        "allow_val_change": True,
        "mode": mode,
        "resume": "allow" if mode == "online" else None,
        "reinit": "create_new",
        "settings": _settings(wandb, init_timeout_s),
    }
    before = _folders(info)
    try:
        with _quiet():
            return wandb.init(**options)
    except Exception as error:
        _remove(_folders(info) - before)
        if is_service_lost(error) or not _others_run():
            forget_service()
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep W&B from naming the source of the key at each try, which an outage has many of.

    `silent` of the run does not reach that line, only this switch of the process does.
    """
    from wandb.errors import term

    before = getattr(term, "_silent", None)
    if before is None:
        yield
        return
    term._silent = True
    try:
        yield
    finally:
        term._silent = before


def is_service_lost(error: Exception) -> bool:
    """Whether W&B's local service process has died, and all runs of this process with it."""
    return isinstance(error, ConnectionError) or type(error).__name__ == "MailboxClosedError"


def forget_service() -> None:
    """Let W&B start a new service process.

    With a dead one it would go on for the rest of the process; and after a failed `init` the
    living one holds the run's id for ever ("run ID … is in use").
    """
    import wandb
    from wandb.sdk import wandb_setup

    connection = getattr(wandb_setup.singleton(), "_connection", None)
    with suppress(Exception):  # a dead service cannot be said goodbye to
        wandb.teardown()
    with suppress(AttributeError):  # nor does W&B then wait for the process, which stays a zombie
        connection._proc._process.poll()  # type: ignore[union-attr]


def _others_run() -> bool:
    """Whether another run of this process uses the service, which must then stay."""
    from wandb.sdk import wandb_setup

    if _ours:
        return True
    # No public name tells of runs made with reinit="create_new"; without it, rather leave all be.
    missing = object()
    return getattr(wandb_setup.singleton(), "most_recent_active_run", missing) is not None


def _settings(wandb: Any, init_timeout_s: float) -> Any:
    """What we want of a run that we create; names that this version does not know are left out."""
    wanted = {
        "console": "off",
        "silent": True,
        "init_timeout": init_timeout_s,
        "finish_timeout": FINISH_TIMEOUT_S,
        "x_transaction_log_flush_interval": FLUSH_S,
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _default_mode(settings: Any) -> str:
    """W&B's own mode; offline instead of the question for a key that nobody is there to answer."""
    mode = str(settings.mode)
    if mode in ("online", "run") and not _is_logged_in(settings):
        _log.warning(
            "wandb: nobody is logged in, so the run is kept offline in its folder; "
            "run 'wandb login' before, or 'wandb sync' after"
        )
        return "offline"
    return mode


def _is_logged_in(settings: Any) -> bool:
    if settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    files = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    hosts = {urlsplit(str(settings.base_url)).netloc, "api.wandb.ai"}
    return any(_names(Path(file).expanduser(), hosts) for file in files if file)


def _names(netrc_file: Path, hosts: set[str]) -> bool:
    try:
        return not hosts.isdisjoint(netrc.netrc(netrc_file).hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def _folders(info: RunInfo) -> set[Path]:
    return set(info.folder.glob("wandb/*run-*")) if info.folder is not None else set()


def _remove(folders: set[Path]) -> None:
    """Every attempt that fails leaves a folder with an empty run; an outage would make hundreds."""
    for folder in folders:
        if not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)

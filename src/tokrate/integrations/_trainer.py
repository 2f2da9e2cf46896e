"""What a `Trainer`'s arguments, state and model tell: read for the callback, nothing kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokrate.config import parse_logger
from tokrate.errors import ConfigError
from tokrate.logger import Logger
from tokrate.meter import ThroughputMeter
from tokrate.ranks import RankLayout


def check_options(
    spec: Any, meter_options: Mapping[str, Any], logger_options: Mapping[str, Any]
) -> None:
    """Refuse what is wrong when the callback is made, long before training."""
    if not isinstance(spec, Logger):
        parse_logger(spec)
    elif logger_options:
        raise ConfigError(
            f"logger_options={dict(logger_options)!r} with a logger that is open already: pass "
            "them to open_logger"
        )
    try:
        ThroughputMeter(**meter_options)
    except TypeError as error:
        raise ConfigError(f"meter_options: {error}; expected those of ThroughputMeter") from None


def read_saved(state: Any, name: str) -> Mapping[str, Any] | None:
    """What an earlier session left in the checkpoint that training goes on from."""
    kept = state.stateful_callbacks.get(name) if state.global_step else None
    kept = kept[0] if isinstance(kept, list) and kept else kept
    if not isinstance(kept, Mapping):
        return None
    saved = (kept.get("attributes") or {}).get("saved")
    return saved if isinstance(saved, Mapping) else None


def shifts_labels(model: Any) -> bool:
    """Whether the model's loss shifts the labels, by the rule that `Trainer` itself goes by."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    while not hasattr(base, "loss_type") and hasattr(base, "module"):
        base = base.module
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return False
    kind = getattr(base, "loss_type", None)
    return kind is None or LOSS_MAPPING.get(kind) is ForCausalLMLoss


def read_layout(args: Any) -> RankLayout:
    """All ranks; with `DataParallel` one process has several devices."""
    return RankLayout(devices=args.n_gpu * args.world_size if args.n_gpu > 1 else None)


def read_config(args: Any, model: Any) -> dict[str, Any]:
    """The arguments of the training, without secrets, and the configuration of the model."""
    config = {"arguments": args.to_dict()}
    if hasattr(getattr(model, "config", None), "to_dict"):
        config["model"] = model.config.to_dict()
    return config


def name_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The names under which transformers' own tracker callbacks write."""
    named = {}
    for key, value in logs.items():
        if isinstance(value, str):
            continue
        group, _, rest = key.partition("_")
        known = rest and group in ("eval", "test")
        named[f"{group}/{rest}" if known else f"train/{key}"] = value
    return named


def saves_best(args: Any) -> bool:
    """Whether a checkpoint may follow an evaluation, depending on what it found."""
    return str(getattr(args.save_strategy, "value", args.save_strategy)) == "best"

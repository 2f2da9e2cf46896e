"""Watching a model: count what its forward is called with, for loops that nobody wants to edit.

    model(**batch) ──► pre-hook ──► read ──► meter.update ──► window
                          │
                          └── not in training mode, no gradients (evaluation, generation, a
                              reference model), or within backward (checkpointing): not counted

The hook sees the batch as the model gets it: on its device, after every collator and wrapper, once
for each micro-batch. torch is never imported here; whoever has a model has it.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from tokrate.collate import ARGUMENTS
from tokrate.errors import ConfigError
from tokrate.meter import ThroughputMeter
from tokrate.reading import Inputs, read_inputs

log = logging.getLogger("tokrate")

Read = Callable[[Inputs], Iterable[Mapping[str, Any]]]
"""Turns a forward's inputs, by parameter name, into arguments of `meter.update`, one for each
sequence that goes through the model; none leaves the call out."""

_claims: weakref.WeakKeyDictionary[Any, Claim] = weakref.WeakKeyDictionary()


class Claim:
    """The right to count the batches of one model, held by one counter at a time."""

    def __init__(self, model: Any, holder: str) -> None:
        self.holder = holder
        self._model = weakref.ref(model)
        _claims[model] = self

    def release(self) -> None:
        """Let somebody else count this model. Calling it again does nothing."""
        model = self._model()
        if model is not None and _claims.get(model) is self:
            del _claims[model]


def claim_model(model: Any, holder: str) -> Claim | None:
    """Become the one that counts the model's batches; None, and said, where somebody does already.

    For integrations that count elsewhere than in a forward hook, so that tokens are counted once
    when two are active.

    Args:
        model: The model, or the module around it that the loop calls.
        holder: Who counts, for the message: `"the Lightning callback"`.
    """
    parts = set(model.modules())
    for claimed, claim in list(_claims.items()):
        if claimed in parts or any(part is model for part in claimed.modules()):
            log.warning(
                f"{holder} was asked to count the batches of a {type(model).__name__} that "
                f"{claim.holder} counts already: they are counted once, by {claim.holder}; "
                "remove one of the two"
            )
            return None
    return Claim(model, holder)


class ModelWatch:
    """A model that is being watched, until `remove`. Also a context manager."""

    def __init__(
        self, model: Any, meter: ThroughputMeter, read: Read, claim: Claim | None, before: Any
    ) -> None:
        self._meter = meter
        self._read = read
        self._claim = claim
        self._before = before
        self._names = _parameter_names(model)
        # Compiled code would otherwise contain the count: a retrace for each of its changes.
        hook = sys.modules["torch"].compiler.disable(self._on_forward)
        self._hook = (
            None if claim is None else model.register_forward_pre_hook(hook, with_kwargs=True)
        )

    @property
    def active(self) -> bool:
        """Whether this one counts; False when somebody else counts the model already."""
        return self._hook is not None

    def remove(self) -> None:
        """Stop watching. Calling it again does nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._claim is not None:
            self._claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _on_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._before is not None:
            self._before(module.training)
        if module.training and sys.modules["torch"].is_grad_enabled() and not _in_backward():
            for batch in self._read(self._named(args, kwargs)):
                self._count(batch)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The inputs by the names of the forward's parameters; a lone dict is taken apart."""
        if len(args) == 1 and isinstance(args[0], Mapping):
            return {**args[0], **kwargs}
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def _count(self, batch: Mapping[str, Any]) -> None:
        if batch.get("labels") is None and batch.get("loss_mask") is None:
            self._meter.lose(
                f"the model was called with {', '.join(batch) or 'nothing that is known by name'}, "
                "and nothing says which tokens are targets: expected labels or loss_mask in its "
                'forward. Say where they are with watch_model(..., fields={"labels": "targets"}) '
                "or read=, or count in the loop with meter.update()"
            )
        else:
            self._meter.update(**batch)


def watch_model(
    model: Any,
    meter: ThroughputMeter,
    *,
    fields: Mapping[str, str] | None = None,
    read: Read | None = None,
    holder: str = "watch_model",
    before: Callable[[bool], None] | None = None,
) -> ModelWatch:
    """Count every batch that the model is trained on, without a line in the loop.

    A call counts when the model is in training mode and gradients are on, outside of backward.
    Watch the module that the loop calls, after `DistributedDataParallel`, `fully_shard` and
    `torch.compile`; a module within it does as well.

    Args:
        model: A `torch.nn.Module`.
        meter: What is counted goes into its open window.
        fields: Where the forward has what: argument of `count_tokens` to parameter name, such as
            `{"labels": "targets"}`; in place of the names that Hugging Face uses.
        read: For forwards of another kind: gets the inputs by parameter name, returns the
            arguments for `meter.update`, one mapping for each sequence.
        holder: Who counts, for the message when two do.
        before: Called before each forward with whether the model is in training mode.

    Returns:
        The watch; `remove()` ends it. It is not active where the model is counted already.

    Raises:
        ConfigError: `model` is no module, or `fields` names what `count_tokens` does not take.
    """
    if not hasattr(model, "register_forward_pre_hook"):
        raise ConfigError(
            f"watch_model({type(model).__name__}, …): expected the torch.nn.Module that the loop "
            "calls"
        )
    if unknown := sorted(set(fields or ()) - set(ARGUMENTS)):
        raise ConfigError(
            f"fields= names {', '.join(unknown)}: expected arguments of count_tokens "
            f"({', '.join(ARGUMENTS)}) with the name of the forward's parameter for each"
        )
    if read is None:
        read = _renamed(fields) if fields else _by_name(meter)
    return ModelWatch(model, meter, read, claim_model(model, holder), before)


def _renamed(fields: Mapping[str, str]) -> Read:
    def read(inputs: Inputs) -> list[dict[str, Any]]:
        return [{ours: inputs[theirs] for ours, theirs in fields.items() if theirs in inputs}]

    return read


def _by_name(meter: ThroughputMeter) -> Read:
    return lambda inputs: read_inputs(inputs, pad_id=meter.pad_id)


def _parameter_names(model: Any) -> list[str]:
    """The names of the positional parameters of the forward, looked up below wrappers."""
    while inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None):
        model = inner
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _in_backward() -> bool:
    """Whether autograd is running backward here: a forward within it is done again, not anew."""
    # No public name says it; torch's own checkpointing and FSDP ask the same.
    task = getattr(sys.modules["torch"]._C, "_current_graph_task_id", None)
    return task is not None and task() != -1

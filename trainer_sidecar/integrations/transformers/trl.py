"""What TRL's trainers have beside Trainer: a reference model, orders and averages of their own.

A reference is made by the script before anything is restored, so it must be the same one at every start, or no loss
after a resume would be that of the run; nobody would see it. So its bytes are a fingerprint. TRL itself is not imported
here: everything goes by names, which trainers of the user's own may bear as well.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer

from trainer_sidecar.train.checksum import checksums

log = logging.getLogger("rtj.train")
REFERENCE = "model.reference"
"""Fingerprint of the reference's weights: another one is refused, as another model is."""
_OF_MICRO_BATCHES = ("aot", "aot_unpaired", "sft")
"""Losses of DPO that sort or average within a micro batch, whose size follows the mesh."""
_COPY = "ref"
"""TRL's name for the copy of an adapter that it compares with."""
_FACTORS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
_UNSAVED = {"BEMACallback": "its running averages are in no save, and would begin anew"}


def unfit(trainer: type, train_dataset: Any) -> Iterator[str]:
    """What in a trainer's class or data would be read or ordered otherwise than the session does."""
    for kind in trainer.__mro__:
        if kind is Trainer:
            break
        if "_get_train_sampler" in vars(kind):
            yield (
                f"{kind.__name__} has an order of samples of its own (_get_train_sampler), of which a resume knows "
                "nothing: the session decides the order (docs/data.md)"
            )
    if isinstance(train_dataset, torch.utils.data.IterableDataset):
        yield (
            "train_dataset is an IterableDataset, which every attempt would read from its beginning: give a map-style "
            "one (load_dataset without streaming), or trainer_sidecar.train.Streams of its shards (docs/data.md)"
        )


def refuse_callbacks(callbacks: Iterable[Any]) -> None:
    """Raises ValueError for one that keeps weights of its own."""
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _UNSAVED:
                raise ValueError(
                    f"{kind.__name__}: {_UNSAVED[kind.__name__]} after a resume: take it out, or keep an average of "
                    'your own by session={"extra": {"ema": ema}}'
                )


def warn_of_losses(args: Any) -> None:
    """Losses that another micro batch size changes go on on another mesh, but are others there."""
    kinds = getattr(args, "loss_type", None)
    found = [kind for kind in (kinds if isinstance(kinds, list) else []) if kind in _OF_MICRO_BATCHES]
    if found and args.process_index == 0:
        log.warning(
            "loss_type %s is made of the samples of one micro batch: where a resize changes the micro batch, losses "
            "change with it, and the checks behind the resume will say so. batch.maxMicroBatchSize 1 to %d keeps it",
            ", ".join(found),
            args.per_device_train_batch_size,
        )


def reference_of(trainer: Any) -> str | None:
    """Digest of the model that a trainer compares with: `ref_model`, or its own model where the log-probabilities were
    computed ahead. None: it has no such model, or one that is sharded."""
    model = getattr(trainer, "ref_model", None)
    if model is not None:
        return _digest(_tensors(model))
    ahead = getattr(trainer.args, "precompute_ref_log_probs", False)
    return _digest(_before_training(trainer.model)) if ahead else None


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _digest(state: Mapping[str, torch.Tensor]) -> str | None:
    """`sha256:<hex>` of names, dtypes, shapes and bytes; None for sharded tensors."""
    if any(isinstance(tensor, DTensor) for tensor in state.values()):
        return None
    sums = dict(zip(state, checksums(list(state.values())), strict=True))
    forms = [(name, str(t.dtype), tuple(t.shape), sums[name]) for name, t in sorted(state.items())]
    return "sha256:" + hashlib.sha256(repr(forms).encode()).hexdigest()


def _before_training(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What of a model is its own reference. Of one with PEFT's adapters: the model without them or, where TRL has
    copied the adapter of a ready PeftModel, with that copy. The adapters that are trained are random at each start, and
    so is half of a copy that was not trained yet, which changes nothing: its other half is zero."""
    state, adapters = _tensors(model), getattr(model, "peft_config", None)
    if not adapters:
        return state
    layers = [
        f"{where}.{layer}.".lstrip(".")
        for where, module in model.named_modules()
        for layer in (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ()))
    ]
    layers.append("prompt_encoder.")
    others = tuple(f"{layer}{name}." for layer in layers for name in adapters if name != _COPY)
    kept = {name: tensor for name, tensor in state.items() if not f"{name}.".startswith(others)}
    return {name: tensor for name, tensor in kept.items() if not _is_half_of_nothing(name, kept)}


def _is_half_of_nothing(name: str, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether it is a factor of a LoRA product of which one is zero."""
    for one, other in _FACTORS:
        if f".{one}.{_COPY}" in name or f".{other}.{_COPY}" in name:
            pair = (name.replace(f".{other}.", f".{one}."), name.replace(f".{one}.", f".{other}."))
            return not all(bool(state[factor].any()) for factor in pair if factor in state)
    return False


def moving_reference(trainer: Any) -> dict[str, Any]:
    """Of the session's `extra`: a reference that follows the model (`sync_ref_model`) is state, and is saved."""
    model = getattr(trainer, "ref_model", None)
    follows = getattr(trainer.args, "sync_ref_model", False) and model is not None
    return {"ref_model": model} if follows else {}


def check_start(trainer: Any) -> None:
    """Behind the restore: imported weights have replaced the model's, and the reference was made before. Raises
    ValueError where log-probabilities were computed with weights that are gone; warns of a reference that differs."""
    session = trainer.session
    if session.step or session.resume is None or trainer.reference is None:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    apart = getattr(trainer, "ref_model", None) is not None
    if _digest(_tensors(model) if apart else _before_training(model)) == trainer.reference:
        return
    if not apart:
        raise ValueError(
            "precompute_ref_log_probs: the reference's log-probabilities were computed with the weights that the "
            "script made, and the run begins with imported ones: load those in the script, or give ref_model"
        )
    if trainer.args.process_index == 0:
        log.warning(
            "the run begins with imported weights, ref_model has others: let the script load the same"
        )

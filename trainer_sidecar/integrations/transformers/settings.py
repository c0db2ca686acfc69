"""Arguments of Trainer that are the plan's now, those that no resume would survive, and what the run is known by."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import TrainingArguments

from trainer_sidecar.contract.plan import AccumulationSave, Plan
from trainer_sidecar.integrations.batch import tell_unused
from trainer_sidecar.integrations.transformers.defaults import defaults_of
from trainer_sidecar.integrations.transformers.trl import REFERENCE
from trainer_sidecar.train import fingerprint
from trainer_sidecar.train.fingerprints import Fingerprints

log = logging.getLogger("rtj.train")
_FOLLOW_THE_MESH = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
)
SET_BY = {
    "model": "Trainer's model",
    "optimizer": "Trainer's optimizer (optim, or optimizers=)",
    "scheduler": "Trainer's (lr_scheduler_type, or optimizers=)",
    "scaler": "Accelerate's",
    "data": "train_dataset",
    "collate": "data_collator",
    "drop_last": "dataloader_drop_last of the arguments",
    "total_steps": "max_steps of the arguments, or num_train_epochs",
    "epochs": "num_train_epochs of the arguments, or max_steps",
    "seed": "data_seed of the arguments, or seed",
    "device": "use_cpu of the arguments",
}
"""Arguments of `Session.from_env`, and where a script of Trainer's says them."""
_SHUFFLED = ("random", "none")


def refuse(args: TrainingArguments, plan: Plan, more: Iterable[str] = ()) -> None:
    """Raises ValueError that names every argument which makes a resume impossible, and what to do instead. `more`: what
    else was found."""
    found = [*_of_the_plan(plan), *_of_trainer(args), *more]
    if found:
        raise ValueError("Trainer cannot be resumed so: " + "; ".join(found))


def _of_the_plan(plan: Plan) -> Iterator[str]:
    mesh = plan.topology.mesh
    if mesh.tp > 1 or mesh.pp > 1:
        yield f"the mesh is {mesh}, and Trainer's loop knows data parallel only: set tp and pp to 1"
    if plan.checkpoint.accumulation_save is not AccumulationSave.BOUNDARY:
        yield (
            f"accumulationSave {plan.checkpoint.accumulation_save}: Trainer divides losses by the tokens of a whole "
            "window, so a window runs again from its start: use boundary"
        )


def _of_trainer(args: TrainingArguments) -> Iterator[str]:
    """By name, for releases that lack an argument."""
    for name, why in (
        (
            "deepspeed",
            "the engine keeps its own state: keep its folder by FolderSession (docs/own-folder.md)",
        ),
        ("parallelism_config", "its ranks share batches as the plan does not know: data parallel only"),
        ("auto_find_batch_size", "the plan says the batch: lower batch.maxMicroBatchSize instead"),
        (
            "load_best_model_at_end",
            "its folders are gone with the pod: choose among commits by rtj pin, rtj export",
        ),
        ("enable_jit_checkpoint", "SIGTERM is the session's, which saves on it"),
        ("group_by_length", "the session decides the order: pack the data instead (docs/data.md)"),
    ):
        if getattr(args, name, None):
            yield f"{name}: {why}"
    windows = _windows_of_accelerate(args).get("num_steps", 1)
    if windows != 1:
        yield (
            f"accelerator_config gradient_accumulation_kwargs num_steps {windows}: the accumulation is the plan's "
            "(batch.globalBatchSize, batch.maxMicroBatchSize): leave it out"
        )
    if args.n_gpu > 1:
        yield f"one process with {args.n_gpu} GPUs (DataParallel): start one rank per GPU"
    strategy = str(getattr(args, "train_sampling_strategy", None) or "random").rpartition(".")[2].lower()
    if strategy not in _SHUFFLED:
        yield f"train_sampling_strategy {strategy}: the session decides the order (docs/data.md)"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "layerwise" in optimizer or "lomo" in optimizer:
        yield f"optim {optimizer}: its state lives in hooks of the parameters, where no save finds it"


def _windows_of_accelerate(args: TrainingArguments) -> dict[str, Any]:
    found: dict[str, Any] | None = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None)
    return {} if found is None else found


def take_over(args: TrainingArguments, plan: Plan) -> None:
    """Batch and accumulation of the plan; Trainer's own checkpoints are off. What changes is told, and warned of
    where a step has another number of samples than the arguments say."""
    _windows_of_accelerate(args).pop("num_steps", None)  # 1, which Trainer would compare with the plan's
    batch, ranks = plan.topology.batch, plan.topology.mesh.dp
    micro, windows = args.per_device_train_batch_size, args.gradient_accumulation_steps
    samples = micro * windows * ranks
    unused = f"per_device_train_batch_size {micro} x gradient_accumulation_steps {windows} on {ranks} ranks"
    tell_unused(plan, samples, f"{unused}, which make {samples}", args.process_index)
    wanted = {
        "per_device_train_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "save_strategy": type(args.save_strategy)("no"),
    }
    for name, value in wanted.items():
        if getattr(args, name) != value:
            log.info("%s is %s, of the plan, not %s", name, value, getattr(args, name))
            setattr(args, name, value)


def fingerprints_of(trainer: Any, more: Mapping[str, str]) -> Fingerprints:
    """Model, reference, adapters, tokenizer with its chat template, and the arguments but for those that follow the
    mesh; `more`: the script's own."""
    model, tokens = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    words = getattr(tokens, "tokenizer", tokens)  # inside a processor
    template = getattr(trainer, "chat_template", None)  # of TRL, in the place of the tokenizer's
    args = {name: value for name, value in trainer.args.to_dict().items() if name not in _FOLLOW_THE_MESH}
    configs = getattr(model, "peft_config", None) or {}
    adapters = {name: config.to_dict() for name, config in configs.items()}
    found = fingerprint(
        model_config=getattr(model, "config", None),
        tokenizer=words if hasattr(words, "get_vocab") else None,
        chat_template=template or (tokens if getattr(tokens, "chat_template", None) else None),
        training_config={**args, "peft": adapters} if adapters else args,
        more={REFERENCE: trainer.reference} if trainer.reference else None,
    )
    return Fingerprints({**found, **more}, defaults_of(trainer.args, configs))

"""Settings of torchtitan that are the plan's now, those that no resume would survive, and what the run is known by."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from trainer_sidecar.contract.plan import AccumulationSave, Plan
from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.integrations.batch import tell_unused
from trainer_sidecar.train import fingerprint

log = logging.getLogger("rtj.train")
SET_BY = {
    "model": "of the config's model",
    "optimizer": "the config's optimizer",
    "scheduler": "the config's lr_scheduler",
    "data": "the config's dataloader",
    "collate": "the config's dataloader",
    "total_steps": "training.steps of the config",
    "epochs": "training.steps of the config",
    "seed": "debug.seed of the config",
}
"""Arguments of `Session.from_env`, and where a config says them."""
_PARTS = ("training", "optimizer", "lr_scheduler", "loss", "dataloader")
_NOT_TOLD = (
    "sharding_config",
    "local_batch_size",
    "global_batch_size",
    "gc_freq",
    "gc_debug",
    "enable_cpu_offload",
    "disable_cuda_graphs",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
)
"""Of these: what follows the mesh, and what changes no number."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def refuse(config: Any, plan: Plan) -> None:
    """Raises ValueError that names every setting which makes a resume impossible, and what to do instead."""
    found = [*_of_the_mesh(config.parallelism, plan.topology.mesh), *_of_the_loop(config, plan)]
    found += _of_checkpoint(config.checkpoint)
    if found:
        raise ValueError("torchtitan cannot be resumed so: " + "; ".join(found))


def _of_the_mesh(settings: Any, mesh: Mesh) -> Iterator[str]:
    """dp of the plan is data_parallel_replicate_degree x data_parallel_shard_degree, tp is tensor_parallel_degree."""
    for name, degree, why in (
        (
            "pipeline_parallel_degree",
            mesh.pp,
            "torchtitan cuts a stage's batches itself, as the plan does not know: leave both at 1",
        ),
        ("context_parallel_degree", 1, "its ranks share samples, and a plan has no such axis: leave it at 1"),
        ("expert_parallel_degree", 1, "experts live on a mesh that a plan does not have: leave it at 1"),
    ):
        found = getattr(settings, name)
        if found > 1 or degree > 1:
            yield f"parallelism.{name} is {found}, pp of the plan's mesh {mesh} is {mesh.pp}; {why}"
    tp = settings.tensor_parallel_degree
    if tp != mesh.tp:
        yield (
            f"parallelism.tensor_parallel_degree is {tp}, tp of the plan's mesh {mesh} is {mesh.tp}: start with --tp "
            f"{tp} of rtj run (parallelism.tp: {tp} of a job)"
        )
    replicas, shards = settings.data_parallel_replicate_degree, settings.data_parallel_shard_degree
    if mesh.dp % replicas or shards not in (-1, mesh.dp // replicas):
        yield (
            f"parallelism.data_parallel_replicate_degree {replicas} x data_parallel_shard_degree {shards} is not dp "
            f"{mesh.dp} of the plan's mesh {mesh}: leave the shard degree at -1, so that it follows the mesh"
        )
    if mesh.zero < 2:
        yield f"ZeRO stage {mesh.zero} of the plan: torchtitan shards by FSDP2, leave --zero (parallelism.zero) at 3"


def _of_the_loop(config: Any, plan: Plan) -> Iterator[str]:
    if plan.checkpoint.accumulation_save is not AccumulationSave.BOUNDARY:
        yield (
            f"accumulationSave {plan.checkpoint.accumulation_save}: torchtitan divides losses by the tokens of a whole "
            "window, so a window runs again from its start: use boundary"
        )
    if config.comm.mode != "default":
        yield f"comm.mode {config.comm.mode}: it trains nothing that could be resumed: use default"


def _of_checkpoint(settings: Any) -> Iterator[str]:
    for name, why in (
        ("create_seed_checkpoint", "weights are made on any mesh: start without it"),
        ("load_only", "a run saves; to read a checkpoint use rtj export"),
        ("exclude_from_loading", "a resume restores everything: reset it after trainer.train() has begun"),
        ("last_save_in_hf", "use rtj export on the last commit"),
    ):
        if value := getattr(settings, name):
            yield f"checkpoint.{name} {value}: {why}"
    if settings.load_step != -1:
        yield (
            f"checkpoint.load_step {settings.load_step}: the run goes on from its newest commit; to go back, "
            "quarantine the newer ones, or fork one by rtj run --resume-from"
        )
    if settings.initial_load_path and not settings.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only False: a run begins at step 0 with weights of elsewhere, without their "
            "optimizer: set it to True"
        )


def take_over(config: Any, plan: Plan, rank: int) -> None:
    """Batch of the plan. What changes is told, and warned of where a step has another number of samples than the
    settings say."""
    batch, training = plan.topology.batch, config.training
    if (samples := training.global_batch_size) > 0:
        tell_unused(plan, samples, f"training.global_batch_size {samples}", rank)
    wanted = {"local_batch_size": batch.micro_batch_size, "global_batch_size": batch.global_batch_size}
    for name, value in wanted.items():
        if getattr(training, name) != value:
            log.info("training.%s is %d, of the plan, not %d", name, value, getattr(training, name))
            setattr(training, name, value)


def fingerprints_of(config: Any, tokenizer: Any) -> dict[str, str]:
    """Model, tokenizer, and the settings that change what is learnt."""
    inner = getattr(tokenizer, "tokenizer", None)
    training = {name: _plain(getattr(config, name)) for name in _PARTS}
    return fingerprint(
        model_config={"flavor": config.model_spec.flavor, **_plain(config.model_spec.model)},
        tokenizer=inner if hasattr(inner, "get_vocab") else None,
        training_config=training,
    )


def _plain(part: Any) -> Any:
    """Settings as plain values; functions without their address, which is another one in every process."""
    if hasattr(part, "to_dict"):
        part = part.to_dict()
    elif hasattr(part, "__dataclass_fields__"):
        part = {name: getattr(part, name) for name in part.__dataclass_fields__}
    if isinstance(part, dict):
        return {name: _plain(value) for name, value in part.items() if name not in _NOT_TOLD}
    if isinstance(part, list | tuple):
        return [_plain(value) for value in part]
    return part if isinstance(part, int | float | bool | None) else _ADDRESS.sub("", str(part))

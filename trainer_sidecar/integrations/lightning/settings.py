"""Arguments of Lightning's Trainer that are the plan's now, those that no resume would survive, a run's fingerprints.

Classes are told by their names, so that `pytorch_lightning` and `lightning.pytorch` are treated alike.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

from trainer_sidecar.contract.plan import AccumulationSave, Plan
from trainer_sidecar.train import fingerprint
from trainer_sidecar.train.environment import Environment

log = logging.getLogger("rtj.train")
_CHANGES_WEIGHTS = (
    "it keeps weights of its own, or changes names and groups of parameters, outside of what is saved"
)
_CALLBACKS = {
    "GradientAccumulationScheduler": "the accumulation is the plan's",
    "BatchSizeFinder": "the batch is the plan's: batch.maxMicroBatchSize bounds the micro batch",
    "LearningRateFinder": "it trains before the run begins: search in a script of its own",
    "OnExceptionCheckpoint": "the session saves, and Lightning would resume from its file instead",
    "StochasticWeightAveraging": _CHANGES_WEIGHTS,
    "WeightAveraging": f"{_CHANGES_WEIGHTS}: give the average to session={{'extra': ...}}",
    "BaseFinetuning": _CHANGES_WEIGHTS,
    "ModelPruning": _CHANGES_WEIGHTS,
    "SpikeDetection": "its statistics are not saved",
}
_STRATEGIES = {
    "FSDPStrategy": "FSDP1 flattens parameters, so that their shards have no names: use ModelParallelStrategy (FSDP2)",
    "DeepSpeedStrategy": "the engine keeps its own state: keep its folder by FolderSession (docs/own-folder.md)",
}
OPTIONS = ("extra", "per_rank", "fingerprints", "accept", "seed")
"""Arguments of `Session.from_env` that are the script's."""
SET_BY = {
    "model": "what fit() is given",
    "optimizer": "of configure_optimizers",
    "scheduler": "of configure_optimizers",
    "scaler": "Lightning's (precision)",
    "data": "of the train loader",
    "collate": "of the train loader",
    "drop_last": "of the train loader",
    "total_steps": "max_steps of Trainer",
    "epochs": "max_epochs of Trainer",
    "device": "accelerator of Trainer",
}
"""The others, and where a script of Lightning's says them."""
_TRIED = "2.6."
_KNOWN_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")


def tell_version(version: str, rank: int) -> None:
    """Warn of a Lightning that was not tried: loops and metrics are reached by names that it may change."""
    if rank == 0 and not version.startswith(_TRIED):
        log.warning(
            "Lightning %s was not tried with this integration, %sx was: what it changes inside its loops may break a "
            "resume. Try one (kill a short run, start it again) before you rely on it",
            version,
            _TRIED,
        )


def device(accelerator: Any) -> str | None:
    """Of the session, for Lightning's argument. Raises ValueError for hardware that it does not know."""
    name = accelerator if isinstance(accelerator, str) else type(accelerator).__name__
    kinds = {"auto": None, "cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
    kinds |= {"CPUAccelerator": "cpu", "CUDAAccelerator": "cuda"}
    if name not in kinds:
        raise ValueError(f"accelerator {name}: the session knows cpu and cuda (gpu)")
    return kinds[name]


def of_the_mesh(named: dict[str, Any], env: Environment, library: Any) -> dict[str, Any]:
    """Arguments with the plan's devices and nodes; without Lightning's checkpoints, unless a callback asks for them.
    Raises ValueError for a cluster environment, since the ranks' seats are the session's."""
    topology, given = env.plan.topology, dict(named)
    wanted = {"devices": topology.ranks_per_node, "num_nodes": topology.nodes, "accelerator": env.device.type}
    for name in ("devices", "num_nodes"):
        if (
            given.get(name, "auto") not in ("auto", -1, "-1", wanted[name], str(wanted[name]))
            and env.rank == 0
        ):
            log.warning("%s is %s, of the plan, not %s", name, wanted[name], given[name])
    if given.get("strategy", "auto") == "auto":
        given["strategy"] = "ddp" if env.world_size > 1 else "auto"
    plugins = given.get("plugins") or []
    plugins = list(plugins) if isinstance(plugins, Iterable) and not isinstance(plugins, str) else [plugins]
    for plugin in plugins:
        if "ClusterEnvironment" in _names(plugin):
            raise ValueError(
                f"plugin {type(plugin).__name__}: which rank sits where is told by rtj (torchrun's variables): leave "
                "the cluster environment out"
            )
    given["plugins"] = [
        *plugins,
        _seats(
            env, importlib.import_module(f"{library.__name__}.plugins.environments").TorchElasticEnvironment
        ),
    ]
    callbacks = given.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, Iterable) else [callbacks]
    if given.get("enable_checkpointing") is None and not any("Checkpoint" in _names(c) for c in callbacks):
        given["enable_checkpointing"] = False
    return {**given, **wanted}


def _seats(env: Environment, base: type) -> Any:
    """Ranks as the session has them, under torchrun or one process without it."""
    seat, topology = env.seat, env.plan.topology
    members = {
        "world_size": lambda _: seat.world_size,
        "global_rank": lambda _: seat.rank,
        "local_rank": lambda _: seat.local_rank,
        "node_rank": lambda _: seat.rank // topology.ranks_per_node,
    }
    return type("SessionEnvironment", (base,), members)()


def refuse(trainer: Any, plan: Plan) -> None:
    """Raises ValueError that names everything which makes a resume impossible, and what to do instead."""
    found = [
        *_of_the_plan(plan),
        *_of_arguments(trainer),
        *_of_strategy(trainer, plan),
        *_of_callbacks(trainer),
    ]
    if found:
        raise ValueError("Lightning's Trainer cannot be resumed so: " + "; ".join(found))


def _of_the_plan(plan: Plan) -> Iterator[str]:
    mesh = plan.topology.mesh
    if mesh.tp > 1 or mesh.pp > 1:
        yield f"the mesh is {mesh}, and this integration knows data parallel only: set tp and pp to 1"
    if plan.checkpoint.accumulation_save is not AccumulationSave.BOUNDARY:
        yield (
            f"accumulationSave {plan.checkpoint.accumulation_save}: Lightning clears gradients by counters of its own, "
            "so a window runs again from its start: use boundary"
        )


def _of_arguments(trainer: Any) -> Iterator[str]:
    for name, neutral, why in (
        ("fast_dev_run", False, "a run of a few batches is not to be resumed: use plain Trainer"),
        ("overfit_batches", 0.0, "the session decides which samples come: give a Subset as data"),
        ("limit_train_batches", 1.0, "it counts batches of one rank: give a Subset as data, or max_steps"),
        ("reload_dataloaders_every_n_epochs", 0, "the session's order is over one data set: use a Mixture"),
        (
            "_val_check_time_interval",
            None,
            "by time ranks and attempts would validate after other steps: give steps",
        ),
    ):
        value = getattr(trainer, name, neutral)
        if value != neutral:
            yield f"{name.removeprefix('_')} {value}: {why}"
    batches = trainer.limit_val_batches
    if isinstance(batches, int) and batches > 0 and not trainer.fast_dev_run:
        yield (
            f"limit_val_batches {batches}: it counts batches of one rank, so another mesh would judge by other "
            "samples: give a Subset as validation data, or a fraction (0.1)"
        )


def _of_strategy(trainer: Any, plan: Plan) -> Iterator[str]:
    strategy, name, mesh = trainer.strategy, type(trainer.strategy).__name__, plan.topology.mesh
    if name not in _KNOWN_STRATEGIES:
        why = _STRATEGIES.get(name, f"known are {', '.join(_KNOWN_STRATEGIES)}")
        yield f"strategy {name}: {why}"
    elif name == "SingleDeviceStrategy" and mesh.world_size > 1:
        yield f"strategy {name} on {mesh.world_size} ranks would train as many models: use ddp"
    elif name == "DDPStrategy":
        if getattr(strategy, "_start_method", "popen") != "popen":
            yield f"strategy ddp_{strategy._start_method}: ranks are started by rtj, use ddp"
        if strategy._ddp_comm_state is not None or strategy._model_averaging_period is not None:
            yield "ddp_comm_state, model_averaging_period: their state is in the hook, where no save finds it"
    elif name == "ModelParallelStrategy":
        sizes = strategy._data_parallel_size, strategy._tensor_parallel_size
        if sizes[0] not in ("auto", mesh.dp) or sizes[1] not in ("auto", 1):
            yield f"data_parallel_size {sizes[0]}, tensor_parallel_size {sizes[1]}: leave them out, the mesh is {mesh}"
    precision = type(trainer.precision_plugin).__name__
    if precision not in _PRECISIONS:
        yield f"precision plugin {precision}: what it keeps is not saved; known are {', '.join(_PRECISIONS)}"


def _of_callbacks(trainer: Any) -> Iterator[str]:
    for callback in trainer.callbacks:
        for name in _names(callback):
            if name in _CALLBACKS:
                yield f"callback {type(callback).__name__}: {_CALLBACKS[name]}"


def _names(value: Any) -> list[str]:
    return [base.__name__ for base in type(value).__mro__]


def refuse_module(module: Any) -> None:
    """Raises ValueError for a LightningModule whose steps the session could not count."""
    if not module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False: when which optimizer steps is told to nobody. Write the loop with a Session "
            "(docs/add-it-to-your-script.md), which takes several optimizers"
        )
    code = getattr(module.training_step, "__code__", None)
    if code is not None and "dataloader_iter" in code.co_varnames[: code.co_argcount]:
        raise ValueError("training_step(dataloader_iter): it would read ahead of the session; take a batch")


def refuse_schedules(configs: list[Any]) -> None:
    """Raises ValueError for a schedule that another mesh would step at other times."""
    for config in configs:
        if config.interval == "step" and config.frequency != 1:
            raise ValueError(
                f"lr_scheduler frequency {config.frequency} with interval 'step' counts micro batches, whose number "
                "follows the mesh: use frequency 1 and let the schedule count"
            )


def refuse_interval(trainer: Any, shortest: int | None, accumulation: int) -> None:
    """Raises ValueError where validation would come in the longer epochs only. `shortest`: steps of an epoch."""
    interval = trainer.val_check_interval
    if shortest is None or not isinstance(interval, int) or trainer.check_val_every_n_epoch is None:
        return
    if trainer.limit_val_batches and interval // accumulation > shortest:
        raise ValueError(
            f"val_check_interval {interval // accumulation} steps: an epoch may have {shortest}, and would not be "
            f"validated. Use at most {shortest}, or check_val_every_n_epoch=None, which counts through all epochs"
        )


def take_over(trainer: Any, plan: Plan) -> int:
    """Accumulation of the plan; validation counted in steps. Returns what the script asked for as accumulation."""
    wanted, accumulation = trainer.accumulate_grad_batches, plan.topology.batch.accumulation
    trainer.accumulate_grad_batches = accumulation
    if isinstance(trainer.val_check_interval, int) and not isinstance(trainer.val_check_interval, bool):
        trainer.val_check_interval *= accumulation
    if type(trainer.strategy).__name__ == "ModelParallelStrategy":
        trainer.strategy._data_parallel_size = plan.topology.mesh.dp
        trainer.strategy._tensor_parallel_size = 1
    return int(wanted)


def fingerprints_of(trainer: Any) -> dict[str, str]:
    """Hyperparameters of the module, and the arguments that change what is learnt and do not follow the mesh."""
    args = {name: getattr(trainer, name) for name in ("max_epochs", "max_steps", "gradient_clip_val")}
    algorithm = trainer.gradient_clip_algorithm
    args["gradient_clip_algorithm"] = str(getattr(algorithm, "value", algorithm))
    args["precision"] = str(trainer.precision)
    args["seed_everything"] = os.environ.get("PL_GLOBAL_SEED", "")
    return fingerprint(training_config={**args, "hparams": dict(trainer.lightning_module.hparams)})

"""What no resume of Lightning's would survive: writes what is said to each to `<TINY_OUT>/lightning-e…-r0.json`."""

import json
import os
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as given
from torch.utils.data import DataLoader, WeightedRandomSampler

from trainer_sidecar.contract.plan import AccumulationSave
from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.integrations.lightning import Resumable, ResumableTrainer
from trainer_sidecar.integrations.lightning.settings import refuse
from trainer_sidecar.train import environment

sys.path.insert(0, str(Path(__file__).parent))
from tiny_lightning import Net, Rows

OUT = Path(os.environ["TINY_OUT"])
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def trainer(**options):
    wanted = {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": str(OUT), **QUIET, **options}
    return ResumableTrainer(**wanted)


def rows(count=16, **options):
    return DataLoader(Rows(count), **{"batch_size": 4, "shuffle": True, **options})


def fit(module=None, train=None, **options):
    trainer(num_sanity_val_steps=0, limit_val_batches=0).fit(
        module or Net(), rows() if train is None else train, **options
    )


class Manual(Net):
    automatic_optimization = False


class Iterates(Net):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


class Every(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 5}]


class Finds(Net):
    def configure_callbacks(self):
        return [given.LearningRateFinder()]


class Rewrites(Net):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["other"] = torch.zeros(1)
        checkpoint["loops"]["mine"] = 1
        checkpoint["callbacks"]["mine"] = {"seen": 1}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Rows(8))


class Leaves(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1


class Nothing(Net):
    def training_step(self, batch, batch_idx):
        return None


class Batches(torch.utils.data.BatchSampler):
    pass


def of_plan(**changes):
    plan = environment.join("cpu").plan
    checkpoint = plan.checkpoint.model_copy(update=changes)
    refuse(trainer(), plan.model_copy(update={"checkpoint": checkpoint}))


def of_mesh(**axes):
    plan = environment.join("cpu").plan
    topology = plan.topology.model_copy(update={"mesh": Mesh(**{"dp": 1, **axes})})
    refuse(trainer(strategy="auto"), plan.model_copy(update={"topology": topology}))


def of_strategy(strategy):
    """Lightning takes some on a GPU only."""
    made = trainer()
    made._accelerator_connector.strategy = strategy
    refuse(made, environment.join("cpu").plan)


def weighted():
    return rows(shuffle=None, sampler=WeightedRandomSampler([1.0] * 16, 16))


def own_batches():
    sampler = Batches(torch.utils.data.RandomSampler(Rows(16)), 4, False)
    return DataLoader(Rows(16), batch_sampler=sampler)


def seldom():
    """Epochs of 3, 2 and 2 steps."""
    trainer(max_epochs=3, val_check_interval=3).fit(Net(), rows(20), rows(shuffle=False))


CASES = {
    "fast": lambda: trainer(fast_dev_run=True),
    "overfit": lambda: trainer(overfit_batches=2),
    "limit": lambda: trainer(limit_train_batches=3),
    "validates": lambda: trainer(limit_val_batches=3),
    "seats": lambda: trainer(plugins=pl.plugins.environments.LightningEnvironment()),
    "reload": lambda: trainer(reload_dataloaders_every_n_epochs=1),
    "clock": lambda: trainer(val_check_interval="00:00:10:00"),
    "fsdp1": lambda: of_strategy(pl.strategies.FSDPStrategy()),
    "precision": lambda: trainer(plugins=[type("Own", (pl.plugins.Precision,), {})()]),
    "sizes": lambda: trainer(strategy=pl.strategies.ModelParallelStrategy(tensor_parallel_size=2)),
    "spawn": lambda: trainer(strategy="ddp_spawn"),
    "averages": lambda: trainer(strategy=pl.strategies.DDPStrategy(model_averaging_period=2)),
    "hardware": lambda: trainer(accelerator="tpu"),
    "schedule": lambda: trainer(callbacks=given.GradientAccumulationScheduler({1: 2})),
    "swa": lambda: trainer(callbacks=[given.StochasticWeightAveraging(1e-2)]),
    "ema": lambda: trainer(callbacks=[given.EMAWeightAveraging()]),
    "unfreeze": lambda: trainer(callbacks=[given.BackboneFinetuning()]),
    "prune": lambda: trainer(callbacks=[given.ModelPruning("l1_unstructured")]),
    "exception": lambda: trainer(callbacks=[given.OnExceptionCheckpoint(str(OUT))]),
    "window": lambda: of_plan(accumulation_save=AccumulationSave.RAW),
    "mesh": lambda: of_mesh(tp=2),
    "alone": lambda: of_mesh(dp=2),
    "bases": lambda: type("Mine", (Resumable,), {})(),
    "behind": lambda: type("Mine", (pl.Trainer, Resumable), {}),
    "memory": lambda: trainer(session={"extra": {"lightning": Net()}}),
    "steps": lambda: trainer(session={"total_steps": 4}),
    "path": lambda: fit(ckpt_path="last"),
    "manual": lambda: fit(Manual()),
    "iterator": lambda: fit(Iterates()),
    "frequency": lambda: fit(Every()),
    "finder": lambda: fit(Finds()),
    "forwards": lambda: fit(train=DataLoader(Endless())),
    "several": lambda: fit(train=[rows(), rows()]),
    "in order": lambda: fit(train=rows(shuffle=False)),
    "weighted": lambda: fit(train=weighted()),
    "batches": lambda: fit(train=own_batches()),
    "seldom": seldom,
    "few": lambda: fit(train=rows(count=6)),
}
LAST = {"rewrites": Rewrites, "skips": Leaves, "nothing": Nothing}
"""Found out while training: each needs an attempt."""


def main():
    one = os.environ.get("LIGHTNING_LAST")
    cases = {one: lambda: fit(LAST[one]())} if one else CASES
    said = {}
    for name, case in cases.items():
        try:
            case()
        except (ValueError, TypeError, environment.TrainingLibraryError) as error:
            said[name] = str(error)
    env = environment.join()
    (OUT / f"lightning-e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(said))


main()

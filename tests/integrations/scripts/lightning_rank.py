"""A script of Lightning's. `LIGHTNING_KILL`: rank 1 dies by SIGKILL once it took that step; `LIGHTNING_FSDP`: FSDP2;
`LIGHTNING_SCALER`: 16-bit mixed precision, whose scale doubles every third step; `LIGHTNING_EARLY`: an early stop may
come once that many steps are done; `LIGHTNING_ROWS`: samples of an epoch; `LIGHTNING_ORDER`: once that step is taken,
the order to save and exit comes, and micro steps take 100 s by the accumulation's clock.

Every rank writes `<TINY_OUT>/lightning-e<epoch>-r<rank>.json`: what was logged and told, the resume.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from trainer_sidecar.integrations.lightning import ResumableTrainer
from trainer_sidecar.train import accumulation, environment

sys.path.insert(0, str(Path(__file__).parent))
from tiny_lightning import Net, Rows, Told


class Sharded(Net):
    def configure_model(self):
        if not hasattr(self, "sharded"):
            self.sharded = True
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Watch(pl.Callback):
    def __init__(self):
        self.events = []
        self.saved_before = None

    def tell(self, what, trainer):
        self.events.append([what, trainer.current_epoch, trainer.global_step])

    def on_sanity_check_start(self, trainer, module):
        self.tell("sanity", trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.seen += len(batch[0])
        if trainer.global_rank == 1 and trainer.global_step == int(os.environ.get("LIGHTNING_KILL", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step == int(os.environ.get("LIGHTNING_ORDER", "-1")) and trainer.global_rank == 0:
            environment.join().order_file.write_text("SaveAndExit")

    def on_train_epoch_start(self, trainer, module):
        self.tell("epoch begins", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.tell("epoch", trainer)

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.tell("validated", trainer)

    def on_train_end(self, trainer, module):
        env = environment.join()
        self.saved_before = (env.outcome_dir / f"rank-{env.rank:05d}.json").exists()


def main():
    pl.seed_everything(3)
    if os.environ.get("LIGHTNING_ORDER"):
        clock = itertools.count(0.0, 100.0)
        accumulation.time = SimpleNamespace(monotonic=lambda: next(clock))
    out, fsdp = Path(os.environ["TINY_OUT"]), bool(os.environ.get("LIGHTNING_FSDP"))
    watch, told = Watch(), Told()
    early = os.environ.get("LIGHTNING_EARLY")
    stop = EarlyStopping("val_loss", patience=1 if early else 9, min_delta=100.0)
    plugins = []
    if os.environ.get("LIGHTNING_SCALER"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3)
        plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
    trainer = ResumableTrainer(
        max_epochs=3,
        min_epochs=None if early else 3,
        min_steps=int(early) if early else None,
        accelerator="cpu",
        strategy=pl.strategies.ModelParallelStrategy() if fsdp else "auto",
        plugins=plugins,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        val_check_interval=2,
        logger=told,
        callbacks=[watch, stop, LearningRateMonitor("step")],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(out),
    )
    module = Sharded() if fsdp else Net()
    rows = Rows(int(os.environ.get("LIGHTNING_ROWS", "20")))
    trainer.fit(module, DataLoader(rows, batch_size=64, shuffle=True), DataLoader(Rows(8), batch_size=2))
    env, resume = environment.join(), trainer.session.resume
    written = {
        "lines": told.lines,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "planned": module.steps,
        "seen": module.seen,
        "waited": stop.wait_count,
        "events": watch.events,
        "saved_before": watch.saved_before,
        "scale": plugins[0].scaler.get_scale() if plugins else None,
        "strategy": type(trainer.strategy).__name__,
        "resume": json.loads(resume.to_json()) if resume else None,
        "files": sorted(p.name for p in out.rglob("*.ckpt")),
    }
    (out / f"lightning-e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(written))


main()

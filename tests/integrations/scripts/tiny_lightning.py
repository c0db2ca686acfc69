"""A LightningModule that is made on the spot, with a schedule by steps and one by epochs, and rows for it."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        x = torch.cos(torch.arange(6.0) * (i + 1))
        return x, x.sum().sin().unsqueeze(0)


class Net(pl.LightningModule):
    def __init__(self, width=16, rate=0.02):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )
        self.seen = 0

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("worst", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log("alone", loss, on_step=False, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("of_rank_0", loss, on_step=False, on_epoch=True, rank_zero_only=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        self.steps = self.trainer.estimated_stepping_batches
        by_step = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=self.steps)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=10.0
        )
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"},
        ]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


class Told(Logger):
    """What Lightning logs, in order."""

    def __init__(self):
        super().__init__()
        self.lines = []

    name = "told"
    version = "0"

    def log_metrics(self, metrics, step=None):
        self.lines.append([step, {name: float(value) for name, value in metrics.items()}])

    def log_hyperparams(self, *args, **kwargs):
        pass

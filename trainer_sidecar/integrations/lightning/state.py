"""What Lightning remembers beside model, optimizers and schedules, as an object of the session's `extra`.

Steps and epochs are the session's and follow from its cursor. Callbacks keep their counters (patience of an early stop,
best score), hooks what they add to a checkpoint, and verdicts of the last validation stay readable for those who judge
by them at the next epoch's end. Read by rank 0, as Lightning's own checkpoints are.
"""

from __future__ import annotations

import copy
from typing import Any

from trainer_sidecar.integrations.lightning.metrics import EpochMetrics
from trainer_sidecar.train.module_state import copied


class LightningMemory:
    """Read from and written to a trainer in place. Values must be plain, or tensors; others are refused at a save.

    `version`: of Lightning, for hooks that look at it.
    """

    def __init__(self, trainer: Any, metrics: EpochMetrics, version: str) -> None:
        self._trainer, self._metrics, self._version = trainer, metrics, version
        self._loaded: dict[str, Any] | None = None
        self._kept: dict[str, Any] | None = None
        self.inside = False
        """An accumulation window is open: a save now is of its start."""

    def state_dict(self) -> dict[str, Any]:
        """Raises ValueError for an `on_save_checkpoint` that changes what Lightning's own checkpoint has."""
        if self._loaded is not None:
            return self._loaded
        if self.inside and self._kept is not None:
            return {**self._kept, "epoch": self._metrics.state(kept=True)}
        return {**self._now(), "epoch": self._metrics.state()}

    def keep(self) -> None:
        """Between two windows: what a save inside the next one holds, since the window runs again from its start.
        Raises as `state_dict`."""
        self._metrics.keep()
        self._kept = copied(self._now())

    def _now(self) -> dict[str, Any]:
        trainer = self._trainer
        data = trainer.datamodule
        return {
            "callbacks": self._callbacks(),
            "hooks": self._from_hooks(),
            "datamodule": dict(data.state_dict()) if data is not None else {},
            "callback_metrics": dict(trainer._logger_connector._callback_metrics),
            "should_stop": bool(trainer.should_stop),
        }

    @property
    def found(self) -> bool:
        """Whether a resume brought something that has not taken effect; imported weights bring nothing."""
        return self._loaded is not None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Kept until `take_effect`: the session compares first."""
        self._loaded = saved

    def take_effect(self, *, inside: bool) -> None:
        """Only where something was `found`. Callbacks are matched by `state_key`; one that the script has no more is
        passed over. `inside` an epoch its metrics go on."""
        saved, trainer = self._loaded, self._trainer
        assert saved is not None
        self._loaded = None
        for callback in trainer.callbacks:
            if callback.state_key in saved["callbacks"]:
                callback.load_state_dict(copy.deepcopy(saved["callbacks"][callback.state_key]))
        checkpoint = {**self._checkpoint(), "callbacks": saved["callbacks"], **saved["hooks"]}
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        if trainer.datamodule is not None and saved["datamodule"]:
            trainer.datamodule.load_state_dict(saved["datamodule"])
        where = trainer.strategy.root_device
        trainer._logger_connector._callback_metrics.update(
            {name: value.to(where) for name, value in saved["callback_metrics"].items()}
        )
        self._metrics.carry(saved["epoch"] if inside else {})
        trainer.should_stop = saved["should_stop"]

    def _callbacks(self) -> dict[str, Any]:
        found = {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks}
        return {key: state for key, state in found.items() if state}

    def _checkpoint(self) -> dict[str, Any]:
        """As hooks get it: the parts that the session saves are there and empty."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": self._version,
            "state_dict": {},
            "loops": {},
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    def _from_hooks(self) -> dict[str, Any]:
        """What `on_save_checkpoint` of callbacks and module adds, under new names."""
        trainer, checkpoint, before = self._trainer, self._checkpoint(), self._checkpoint()
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_save_checkpoint(checkpoint)
        changed = [name for name, value in before.items() if checkpoint.get(name, value) != value]
        if changed:
            raise ValueError(
                f"on_save_checkpoint changes {', '.join(changed)} of the checkpoint, which the session saves as they "
                "are: add under names of your own, or give the object to session={'extra': ...}"
            )
        return {name: value for name, value in checkpoint.items() if name not in before}

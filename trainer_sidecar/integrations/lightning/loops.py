"""Lightning's two training loops with the session's calls in them, and the callback that begins the session.

Lightning has no hook behind a step's validation, behind an epoch's last scheduler, nor one that ends a run without the
hooks of an epoch's end; its loops have methods for all three. A step is closed, and saved when it is due, only there:
once it was logged and validated, and of an epoch's last step once the epoch's end was told. So what is saved holds the
verdicts of that very step, and nothing runs twice.
"""

from __future__ import annotations

from typing import Any

from trainer_sidecar.integrations.lightning.bridge import Bridge
from trainer_sidecar.integrations.lightning.epochs import set_counters_inside
from trainer_sidecar.train import TrainingLibraryError


def install(trainer: Any, bridge: Bridge, library: Any) -> None:
    """Loops and callback of the session in `trainer`. SIGTERM is left to the session, which saves on its order."""
    trainer._signal_connector.register_signal_handlers = lambda: None
    before = trainer.fit_loop
    loop = type("SessionFitLoop", (FitPart, library.loops._FitLoop), {})(
        trainer, before.min_epochs, before.max_epochs
    )
    inner = type("SessionEpochLoop", (EpochPart, library.loops._TrainingEpochLoop), {})(
        trainer, before.epoch_loop.min_steps, before.epoch_loop.max_steps
    )
    loop.bridge = inner.bridge = bridge
    loop.epoch_loop, trainer.fit_loop = inner, loop
    callback = type("SessionCallback", (CallbackPart, library.Callback), {})()
    callback.bridge = bridge
    trainer.callbacks.insert(0, callback)


class FitPart:
    """Of the loop over epochs."""

    bridge: Bridge
    _combined_loader: Any
    _data_source: Any

    def setup_data(self) -> None:
        """The session's batches stand in for the script's loader."""
        if self._combined_loader is None:
            self._data_source.instance = self.bridge.loader
        super().setup_data()  # type: ignore[misc]

    @property
    def done(self) -> bool:
        """Also once the session has saved on order, whatever `min_epochs` says, or has taken its last step."""
        return self.bridge.leaving or super().done  # type: ignore[misc]

    def on_advance_start(self) -> None:
        self.bridge.open_epoch()
        super().on_advance_start()  # type: ignore[misc]

    def advance(self) -> None:
        """One epoch. An order within it ends the run, not the epoch: its hooks are those of the attempt to come."""
        super().advance()  # type: ignore[misc]
        if self.bridge.leaving:
            raise StopIteration

    def on_advance_end(self) -> None:
        self.bridge.close_epoch()
        super().on_advance_end()  # type: ignore[misc]
        self.bridge.close_step()

    def on_run_end(self) -> None:
        """Save and wait for the commit before a callback's `on_train_end` may change the model."""
        self.bridge.close()
        super().on_run_end()  # type: ignore[misc]


class EpochPart:
    """Of the loop over micro batches."""

    bridge: Bridge

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        if (place := self.bridge.resumed_inside()) is not None:
            set_counters_inside(self, place, self.bridge.accumulation)

    @property
    def done(self) -> bool:
        return self.bridge.leaving or super().done  # type: ignore[misc]

    def advance(self, data_fetcher: Any) -> None:
        """One micro batch. Raises TrainingLibraryError where a hook ends the epoch before its last one."""
        try:
            super().advance(data_fetcher)  # type: ignore[misc]
        except StopIteration:
            raise TrainingLibraryError(
                "an epoch ended before its last batch: on_train_batch_start returned -1, and the samples that it "
                "leaves out would be given by no attempt. Use max_steps, or stop by trainer.should_stop"
            ) from None
        self.bridge.close_micro()

    def on_advance_end(self, data_fetcher: Any) -> None:
        super().on_advance_end(data_fetcher)  # type: ignore[misc]
        if not self.done:
            self.bridge.close_step()

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning asks for a signal at every batch; the session's ranks agree on orders by themselves."""


class CallbackPart:
    """Stands before all others: what they see in `on_fit_start` is restored."""

    bridge: Bridge

    def setup(self, _trainer: Any, _module: Any, stage: str) -> None:
        if stage == "fit":
            self.bridge.check()

    def on_fit_start(self, _trainer: Any, _module: Any) -> None:
        """Model, optimizer and schedules exist, no batch was read: restore, or begin."""
        self.bridge.begin()

    def on_train_batch_end(
        self, _trainer: Any, _module: Any, outputs: Any, _batch: Any, _batch_idx: int
    ) -> None:
        self.bridge.note_loss(outputs)

"""What Trainer remembers beside model and optimizer, as an object of the session's `extra`.

Step and epoch are the session's and follow from its cursor. Folders of Trainer's own checkpoints are not kept, since
there are none. Callbacks keep their counters (patience of an early stop), their settings are the script's.

Trainer counts tokens and FLOPs with each micro batch. An order may cut a window, which then runs again from its start:
such a save holds what was counted when the window began.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.trainer_callback import ExportableState

from trainer_sidecar.train import tagged

_KEPT = ("best_metric", "best_global_step", "num_input_tokens_seen")
HISTORY = 1000
"""Newest entries of `log_history` that a save holds; all of them would make manifests grow for ever."""


class TrainerMemory:
    """`TrainerState` and stateful callbacks of a trainer, read and written in place."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._at_start: dict[str, Any] | None = None
        self.found = False
        """Whether a resume brought something; imported weights bring nothing."""
        self.stopped = False
        """Whether what it brought was ended early."""

    def window_begins(self) -> None:
        """Before a window's first micro batch: keep what an order that cuts the window has to save."""
        self._at_start = copy.deepcopy(self._now()) if self._trainer.session.accumulation > 1 else None

    def state_dict(self) -> dict[str, Any]:
        """What is told to people as plain values: numbers that NumPy or torch made become Python's, anything else its
        text. Callbacks' attributes tagged, so that they come back as they are; raises TypeError for one that cannot."""
        session = self._trainer.session
        cut = self._at_start if session is not None and session.micro > 0 else None
        kept = dict(self._now() if cut is None else cut)
        callbacks = [[name, _tagged(name, values)] for name, values in kept.pop("callbacks")]
        told: dict[str, Any] = json.loads(json.dumps(kept, default=_plain))
        return {**told, "callbacks": callbacks, "stopped_early": self._trainer.stopped_early}

    def _now(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        unsummed = trainer.current_flos * trainer.args.world_size
        return {
            **{name: getattr(state, name, None) for name in _KEPT},
            "total_flos": state.total_flos + unsummed,
            "log_history": _Entries(state.log_history[-HISTORY:]),
            "num_tokens": getattr(trainer, "_total_train_tokens", None),  # of TRL
            "callbacks": [[name, callback.state()["attributes"]] for name, callback in self._callbacks()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Callbacks are matched by class and order; one that the script has no more is passed over. Their tensors come
        back on the CPU."""
        state, self.found = self._trainer.state, True
        for name in (*_KEPT, "total_flos", "log_history"):
            setattr(state, name, saved[name])
        self.stopped = saved.get("stopped_early", False)
        if saved.get("num_tokens") is not None:
            self._trainer._total_train_tokens = saved["num_tokens"]
        attributes = [(name, values) for name, values in saved["callbacks"]]
        for name, callback in self._callbacks():
            at = next((i for i, (known, _) in enumerate(attributes) if known == name), None)
            if at is not None:
                for key, value in attributes.pop(at)[1].items():
                    setattr(callback, key, tagged.decode(value))

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                yield type(callback).__name__, callback


class _Entries(list[Any]):
    """Logged once and never changed: a copy of the list is enough."""

    def __deepcopy__(self, _memo: Any) -> list[Any]:
        return list(self)


def _tagged(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {key: tagged.encode(value, key) for key, value in attributes.items()}
    except TypeError as error:
        raise TypeError(f"of the attributes in state() of callback {name}, {error}") from error


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)

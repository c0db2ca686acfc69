"""Does a run still hold the tensors that its session began with? A checkpoint of other ones fits no resume.

The next attempt of the same script begins with the model and the extra objects of the first one, and names, shapes and
dtypes are compared (`compare`). So a buffer that a forward pass registers, resizes or casts would make checkpoints that
nobody can load, and retention would take away the last one that can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_sidecar.train.ownership import Entry

_Form = tuple[str, tuple[int, ...]]
"""dtype and global shape."""
_WHY = "so that no resume of this script would fit what is saved"


class Forms:
    """dtypes and shapes of parameters, persistent buffers and tensors of extra objects, by the name under which they
    are stored, as they were when a session began.

    Raises ValueError for a lazy module's tensor, which has no shape yet.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._first: dict[str, _Form] = {}
        self._parameters: set[str] = set()
        self._fitting: tuple[Sequence[Entry], Sequence[Entry]] = (), ()
        """Parameters of the newest walk that fitted, and the rest."""
        for name, tensor in tensors:
            if is_lazy(tensor):
                raise ValueError(
                    f"{name} has no shape yet (a lazy module), {_WHY}: run one batch through the model before "
                    "Session.from_env, in every attempt"
                )
            self._first[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            if isinstance(tensor, nn.Parameter):
                self._parameters.add(name)

    def refuse_changed(self, parameters: Sequence[Entry], beside: Sequence[Entry]) -> None:
        """`parameters` (the same object until they are walked again), and all else: those of now.

        Compares nothing twice. Raises ValueError with the tensor, what it was, what it is, and the next step.
        """
        if parameters is not self._fitting[0] or beside != self._fitting[1]:
            self._refuse({e.name: (e.dtype, e.shape) for e in (*parameters, *beside)})
            self._fitting = parameters, beside

    def _refuse(self, now: Mapping[str, _Form]) -> None:
        for name, form in now.items():
            before = self._first.get(name)
            if before is None:
                raise ValueError(
                    f"{self._kind(name)}, {_told(form)}, was not there when the session began, {_WHY}: make it before "
                    f"Session.from_env, in every attempt{self._or_not(name)}"
                )
            if form != before:
                full = "" if name in self._parameters else ", at its full size where it grows"
                raise ValueError(
                    f"{self._kind(name)} was {_told(before)} when the session began and is {_told(form)} now, {_WHY}: "
                    f"give it that form before Session.from_env, in every attempt{full}{self._or_not(name)}"
                )
        for name in self._first:
            if name not in now:
                raise ValueError(
                    f"{self._kind(name)}, {_told(self._first[name])}, was there when the session began and is gone, "
                    f"{_WHY}: take it out before Session.from_env, in every attempt{self._or_not(name)}"
                )

    def _kind(self, name: str) -> str:
        kind, _, rest = name.partition("/")
        if kind == "extra":
            return f"tensor {rest} of the extra objects and modules' own state"
        return f"{'parameter' if name in self._parameters else 'buffer'} {rest}"

    def _or_not(self, name: str) -> str:
        if name.startswith("extra/"):
            return ", or let its state_dict() (get_extra_state()) hold numbers and lists instead"
        if name in self._parameters:
            return ""
        return ", or register it with persistent=False where it need not be saved"


def _told(form: _Form) -> str:
    return f"{form[0]}{list(form[1])}"

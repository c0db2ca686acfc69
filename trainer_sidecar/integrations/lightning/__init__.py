"""PyTorch Lightning's `Trainer` that resumes: the loop stays Lightning's, the session feeds, saves, restores, checks.

trainer = ResumableTrainer(max_epochs=3)   # or: class Mine(Resumable, MyTrainer)
trainer.fit(model, train_loader, val_loader)

`pytorch_lightning` and `lightning.pytorch` are one library under two names, whose classes do not fit each other.
`ResumableTrainer` derives from the one that the script imported first. What it changes, and refuses: docs/lightning.md.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from trainer_sidecar.integrations.bases import refuse_alone, refuse_behind
from trainer_sidecar.integrations.lightning import settings
from trainer_sidecar.integrations.lightning.bridge import Bridge
from trainer_sidecar.integrations.lightning.loops import install
from trainer_sidecar.integrations.options import refuse_extra, refuse_options
from trainer_sidecar.train import Session, environment

_FLAVOURS = ("lightning.pytorch", "pytorch_lightning")


def _flavour() -> Any:
    """The library that was imported already, else the one that is installed. Raises ModuleNotFoundError."""
    imported = [name for name in _FLAVOURS if name in sys.modules]
    installed = [name for name in _FLAVOURS if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ModuleNotFoundError(
            "neither lightning nor pytorch_lightning is installed: pip install lightning"
        )
    return importlib.import_module((imported or installed)[0])


def _home(kind: type) -> str | None:
    """The library whose Trainer it is."""
    homes = [name for name in _FLAVOURS if kind.__module__.startswith(f"{name}.")]
    return homes[0] if homes and kind.__name__ == "Trainer" else None


def _is_trainer(kind: type) -> bool:
    return _home(kind) is not None


def _library(trainer: type) -> ModuleType:
    """Where the Trainer among the bases comes from. Raises TypeError when there is none."""
    refuse_alone(trainer, Resumable, _is_trainer, "Lightning")
    return importlib.import_module(next(home for home in map(_home, trainer.__mro__) if home))


class Resumable:
    """Comes before a Lightning Trainer class in the list of bases.

    `session`: further arguments of `Session.from_env` (`extra`, `per_rank`, `fingerprints`, `accept`, `seed`). Devices,
    nodes and accumulation are the plan's. Raises ValueError for arguments that no resume would survive.
    """

    callbacks: list[Any]
    fit_loop: Any

    def __init_subclass__(cls, **named: Any) -> None:
        """Raises TypeError for a class in whose bases Lightning's Trainer comes first."""
        super().__init_subclass__(**named)
        refuse_behind(cls, Resumable, _is_trainer)

    def __init__(self, *, session: Mapping[str, Any] | None = None, **named: Any) -> None:
        library = _library(type(self))
        refuse_options(session or {}, settings.SET_BY, settings.OPTIONS)
        refuse_extra(session or {}, {"lightning"})
        env = environment.join(settings.device(named.get("accelerator", "auto")))
        settings.tell_version(library.__version__, env.rank)
        super().__init__(**settings.of_the_mesh(named, env, library))
        settings.refuse(self, env.plan)
        accumulation = settings.take_over(self, env.plan)
        self._bridge = Bridge(self, env, dict(session or {}), accumulation, library.__version__)
        install(self, self._bridge, library)

    @property
    def session(self) -> Session | None:
        """Once `fit` has begun."""
        return self._bridge.session

    def fit(self, model: Any, *given: Any, ckpt_path: Any = None, **named: Any) -> None:
        """As Lightning's; the plan says where it resumes from. Raises ValueError for a path to go on from, and for what
        no resume of this module would survive."""
        if (path := ckpt_path or (given[3] if len(given) > 3 else None)) is not None:
            raise ValueError(
                f"fit(ckpt_path={path!r}): the run goes on from its newest commit; to begin with other "
                "weights load them into the model, or use rtj import"
            )
        settings.refuse_module(model)
        with contextlib.ExitStack() as ends:
            self._bridge.ends = ends
            super().fit(model, *given, **named)  # type: ignore[misc]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Steps of the whole run, the same on every mesh; infinite without an end."""
        return self._bridge.estimated_steps


class ResumableTrainer(Resumable, _flavour().Trainer):  # type: ignore[misc]
    """Lightning's `Trainer` that resumes."""

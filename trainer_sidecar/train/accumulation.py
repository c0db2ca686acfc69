"""The accumulation window and its saves: what a save inside it holds, and how a resume goes on with it (datapath T17).

Three ways out of an open window. With its gradients (`reduced`, `raw`), at any micro step. As it was at its start
(`boundary`, or where gradients cannot be had): parameters and optimizers have not moved since, so only what a forward
pass moves is kept from there; the window then runs again. Or not at all: the save waits for the window's end.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainer_sidecar.contract.checkpoint import ManifestFile, Tensors
from trainer_sidecar.contract.plan import AccumulationSave
from trainer_sidecar.train import rng
from trainer_sidecar.train.capture import Captured, Piece, State, local_of
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.gradients import OWN, Gradients, is_gradient
from trainer_sidecar.train.module_state import copied
from trainer_sidecar.train.scalars import Number
from trainer_sidecar.train.window import Split, Window, consumed, handed_out, micro_steps_left

log = logging.getLogger("rtj.train")
_EVERY_SECONDS = 1.0
"""Between two agreements inside a window that is not saved with its gradients (T21: none where windows are short)."""


@dataclass
class OpenWindow:
    """What a save inside a window adds to the rest of the state."""

    document: dict[str, Any]
    micro_step: int = 0
    rank_document: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Start:
    """What a forward pass moves, as it was at the window's start: generators, buffers, modules' own state."""

    random: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    modules: dict[str, Any]


@dataclass
class TakenOver:
    """What a resume makes of a window that was open at the save; `rerun` samples are consumed a second time."""

    pieces: list[Piece] = field(default_factory=list)
    splits: tuple[Split, ...] = ()
    loss: float | None = None
    weight: float | None = None
    absent: tuple[str, ...] = ()
    scale: float = 1.0
    rerun: int = 0
    says: str = ""


class Accumulation:
    """This rank's window. `model` is the script's, inside DDP or not."""

    def __init__(self, env: Environment, state: State, cursor: Cursor, *, loader_state: bool) -> None:
        self._env, self._state, self._cursor = env, state, cursor
        self._topology = env.plan.topology
        self.mode = env.plan.checkpoint.accumulation_save
        self.gradients = Gradients(state.outer, state, env.world_size, env.rank, self._topology.mesh.dp)
        self.window = Window()
        self._loader_state = loader_state
        self._rewinds = cursor.order is not None and not loader_state
        """Whether the window's start can be told: the session feeds the samples, not a loader with its own state."""
        self._start: _Start | None = None
        self._verdict: tuple[tuple[int, int], str] | None = None
        """Why the gradients of a place (step, micro step) cannot be saved, as agreed."""
        self.read_to = 0
        """Micro steps of the window up to which a loader that keeps its own place has been read."""
        self._closed_at = time.monotonic()
        self.micro_seconds: float | None = None
        if self.mode is AccumulationSave.RAW and self.size > 1 and env.rank == 0:
            self._tell_size()

    def _tell_size(self) -> None:
        """What a save inside a window may cost, before the first one (T17)."""
        each = sum(p.numel() * p.element_size() for _, p in self.gradients.parameters())
        log.info(
            "accumulationSave raw: where gradients are reduced at the window's end only, a save inside it holds up to "
            "%.1f MiB of them per rank, %.1f MiB in all",
            each / 2**20,
            each * self._env.world_size / 2**20,
        )

    # -- the window as it moves

    @property
    def size(self) -> int:
        return self._topology.batch.accumulation

    @property
    def is_last(self) -> bool:
        """Whether the micro step that is under way closes the window."""
        return self.window.micro == self.size - 1

    @property
    def inside(self) -> bool:
        """Whether this attempt has closed a micro step of the window that is open."""
        return self.window.micro > self.window.began

    def note_start(self) -> None:
        """Before a window's first batch: what a forward pass moves as it is now, in case the window must run again.

        Before the first one of an attempt: the gradients that the resume has put in. Raises TrainingLibraryError.
        """
        dropped = self.gradients.still_there()
        if dropped:
            log.warning(
                "the script dropped %d gradients of the window that it goes on with: put back", dropped
            )
        if self.size == 1 or self.inside or self.window.micro or not self._rewinds:
            return
        buffers = {
            name: local_of(tensor).detach().clone()
            for name, tensor in self._state.model_tensors()
            if not isinstance(tensor, torch.nn.Parameter)
        }
        modules = {key: copied(module.state_dict()) for key, module in self._state.modules.items()}
        self._start = _Start(rng.capture(self._env.device), buffers, modules)

    def close_micro(self, loss: Number, weight: Number) -> bool:
        """Count a micro step; whether the window stays open."""
        now = time.monotonic()
        took, self._closed_at = now - self._closed_at, now
        self.micro_seconds = took if self.micro_seconds is None else (self.micro_seconds + took) / 2
        self.window.add(loss, weight)
        if self.is_last:
            return False
        self.window.micro += 1
        return True

    def next_window(self) -> Window:
        """The window that is done; a new one is open."""
        done, self.window = self.window, Window()
        return done

    def meets(self, micro_seconds: float) -> bool:
        """Whether the ranks agree after this micro step; `micro_seconds` as agreed before, so that all answer alike."""
        if self.mode is not AccumulationSave.BOUNDARY or not micro_seconds:
            return True
        return self.window.micro % max(1, round(_EVERY_SECONDS / micro_seconds)) == 0

    @property
    def seconds_left(self) -> float:
        """How long the rest of the window takes, by the micro steps so far."""
        return (self.size - self.window.micro) * (self.micro_seconds or 0.0)

    # -- saving

    def holds_gradients(self) -> bool:
        """Whether a save now would hold the window's gradients; the same on all ranks. Collective, see `why_not`."""
        return self.inside and self.mode is not AccumulationSave.BOUNDARY and not self.why_not()

    def why_not(self) -> str:
        """Why the window's gradients cannot be saved now, in words; empty when they can.

        Collective at the first call of a micro step: a rank whose parameters had no part in the loss sees nothing
        wrong with their gradients, and ranks that decide otherwise would wait for each other for ever.
        """
        if self._topology.mesh.pp > 1:
            return "pipeline stages hold gradients of different parameters"
        place = self._cursor.step, self.window.micro
        if self._verdict is None or self._verdict[0] != place:
            mine = self.gradients.unsavable(self.mode is AccumulationSave.REDUCED)
            if self.read_to > self.window.micro:
                mine = "the loader has handed out the rest of the window already, by windows()"
            (refusals,) = self._sum([float(bool(mine))])
            others = (
                f"gradients of {refusals:.0f} other ranks cannot be saved as they are" if refusals else ""
            )
            self._verdict = place, mine or others
        return self._verdict[1]

    @property
    def can_rewind(self) -> bool:
        return self._start is not None

    def capture(self, captured: Captured) -> OpenWindow:
        """Add the gradients to `captured`. Collective: a small sum, and the reduction itself in mode `reduced`."""
        reduced = self.mode is AccumulationSave.REDUCED
        names = [name for name, _ in self.gradients.parameters()]
        mine_shared, mine_own = self.gradients.live()
        window = self.window
        loss, weight = _float(window.loss), _float(window.weight)
        facts = [loss or 0.0, weight or 0.0, float(loss is not None), float(weight is not None)]
        facts += [float(name in mine_shared) for name in names] + [float(name in mine_own) for name in names]
        totals = self._sum(facts)
        shared = [n for n, seen in zip(names, totals[4 : 4 + len(names)], strict=True) if seen]
        own = [n for n, seen in zip(names, totals[4 + len(names) :], strict=True) if seen]
        if reduced and own:
            self.gradients.reduce(own)
            shared, own = [n for n in names if n in {*shared, *own}], []
        captured.pieces += self.gradients.capture(shared, own, reduced=reduced)
        splits = window.splits(self._topology, self._cursor.before)
        copies = self._topology.mesh.world_size // self._topology.mesh.dp
        document = {
            "mode": self.mode.value,
            "splits": [split.document() for split in splits],
            "loss": totals[0] / totals[2] if totals[2] else None,
            "weight": totals[1] / copies if totals[3] else None,
            "divided": self.gradients.divided,
        }
        absent = [name for name in own if name not in mine_own]
        return OpenWindow(document, window.micro, {"loss": loss, "weight": weight, "absent": absent})

    def rewind(self, captured: Captured, rank_state: dict[str, Any]) -> OpenWindow:
        """Make `captured` and `rank_state` those of the window's start."""
        assert self._start is not None
        rank_state["rng"] = self._start.random
        for piece in captured.pieces:
            before = self._start.buffers.get(piece.entry.name.removeprefix("model/"))
            if before is not None:
                piece.local = before
        for key, state in self._start.modules.items():
            self._state.put_extra(captured, key, state)
        splits = self.window.splits(self._topology, self._cursor.before)
        return OpenWindow({"discarded": consumed(splits)})

    def _sum(self, numbers: list[float]) -> list[float]:
        if self._env.world_size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        dist.all_reduce(total, group=self._env.control)
        return [float(x) for x in total.tolist()]

    # -- resuming

    def take_over(self, manifest: ManifestFile, tensors: Tensors, rank_state: Any) -> TakenOver:
        """How to go on with the window that was open at the save. Nothing is changed yet.

        Raises ValueError, the same on every rank, when it can neither go on nor run again.
        """
        document = manifest.training_state.accumulation
        if document is None:
            return TakenOver()
        if "discarded" in document:
            count = document["discarded"]
            return TakenOver(rerun=count, says=f"was saved as it began: {count} samples are consumed again")
        splits = tuple(Split.of(s) for s in document["splits"])
        same = (
            manifest.topology.mesh == self._topology.mesh and manifest.topology.batch == self._topology.batch
        )
        why = "" if same else self._why_again(manifest, tensors, splits)
        if why and self._loader_state:
            raise ValueError(
                f"the accumulation window that was open at the save would have to run again ({why}), but the per_rank "
                f"objects stand behind its {consumed(splits)} consumed samples: resume with the checkpoint's batch, "
                "or from one that was saved between two steps"
            )
        if why:
            count = consumed(splits)
            return TakenOver(rerun=count, says=f"runs again, {count} samples are consumed twice: {why}")
        pieces, mine = self.gradients.targets(tensors), rank_state.get("window") or {}
        left = micro_steps_left(self._topology, splits)
        says = f"goes on with its gradients ({document['mode']}), {left} of {self.size} micro steps are left"
        if same:
            absent = tuple(mine.get("absent", ()))
            loss, weight = _float(mine.get("loss")), _float(mine.get("weight"))
            return TakenOver(pieces, splits, loss, weight, absent, says=says)
        weight, scale = _float(document["weight"]), 1.0
        if weight is not None:  # gradients of sums: the mean over the replicas has divided them by dp
            scale = manifest.topology.mesh.dp / self._topology.mesh.dp
            weight = weight if self._env.dp_rank == 0 else 0.0
        return TakenOver(pieces, splits, _float(document["loss"]), weight, scale=scale, says=says)

    def _why_again(self, manifest: ManifestFile, tensors: Tensors, splits: tuple[Split, ...]) -> str:
        before, now = manifest.topology, self._topology
        if before.batch.global_batch_size != now.batch.global_batch_size:
            return f"the global batch was {before.batch.global_batch_size}, is {now.batch.global_batch_size}"
        if any(name.startswith(OWN) for name in tensors.names):
            return f"each rank of {before.mesh} has gradients of its own, this is {now.mesh} (accumulationSave: raw)"
        if manifest.training_state.accumulation["divided"]:
            return "the script sets FSDP2's divide factor, so its gradients belong to one mesh"
        if micro_steps_left(now, splits) is None:
            rest = now.batch.global_batch_size - consumed(splits)
            each = f"dp {now.mesh.dp} x {now.batch.micro_batch_size} samples"
            return f"the {rest} samples that are left are no whole micro steps of {each}"
        return ""

    def go_on(self, taken: TakenOver) -> None:
        """After the load: gradients, losses and the place in the window become those of the save."""
        if not taken.splits:
            return
        loaded = {piece.entry.name: _as_given(piece) for piece in taken.pieces}
        self.gradients.put_in(loaded, taken.absent, taken.scale)
        left = micro_steps_left(self._topology, taken.splits)
        assert left is not None, "decided before"
        micro = self.size - left
        self._cursor.before = taken.splits
        ids = []
        if self._cursor.order is not None:
            places = handed_out(self._topology, taken.splits, self._env.dp_rank)
            ids = self._cursor.batch_ids()[places].tolist()
        self.window = Window(micro, taken.loss, taken.weight, ids, began=micro)


def without_gradients(captured: Captured) -> Captured:
    """What the state digest covers."""
    return captured.only([p for p in captured.pieces if not is_gradient(p.entry.name)])


def _as_given(piece: Piece) -> torch.Tensor:
    return piece.local if piece.entry.name.startswith(OWN) else piece.tensor


def _float(number: Number | str) -> float | None:
    """Documents hold what is no finite number as text."""
    return None if number is None else float(number)

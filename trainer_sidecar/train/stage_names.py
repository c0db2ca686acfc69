"""Is every name one tensor over all pipeline stages? Looked at when a session begins, before anything is saved (T13).

Two stages that both call their first block `layers.0` would be saved as replicas of one tensor, and one of them lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer_sidecar.contract.base import Document
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.capture import Piece, State
from trainer_sidecar.train.digest import to_hex
from trainer_sidecar.train.replicas import shard_digest
from trainer_sidecar.train.whole import whole

_HELD = ("model/", "extra/")
_SHOWN = 10


class _Names(Document):
    """The tensors of a rank, by name: how each looks and lies, and whether it trains. `optimizers` by their groups."""

    looks: dict[str, str]
    trains: list[str]


def meet_stages(agreement: Agreement, state: State, *, fresh: bool) -> None:
    """Find the names that several pipeline stages have, and refuse those that are not the same tensor there.

    Such a name is one tensor of the checkpoint. Parameters that train must be declared (`Stage.shared`), because equal
    seeds make equal beginnings; other tensors must be equal (looked at when the run is `fresh`; a restore makes them
    so). Raises ValueError, the same on every rank, naming each of them, or what else of the stages does not fit.
    """
    places = state.places
    if places.stages == 1:
        return
    state.share({})
    pieces = {
        p.entry.name: p for p in state.capture(documents=False).pieces if p.entry.name.startswith(_HELD)
    }
    looks = {name: _look(piece, places.stage * places.per_stage) for name, piece in pieces.items()}
    trains = [
        n for n, p in pieces.items() if isinstance(p.tensor, torch.nn.Parameter) and p.tensor.requires_grad
    ]
    said = _Names(looks=looks, trains=trains) if places.speaks else None
    told = [
        _Names.model_validate_json(data)
        for data in agreement.gather(said.to_bytes() if said else b"")
        if data
    ]
    stages: dict[str, list[int]] = {}
    for stage, names in enumerate(told):
        for name in names.looks:
            stages.setdefault(name, []).append(stage)
    shared = {name: tuple(where) for name, where in stages.items() if len(where) > 1}
    found = _different(shared, told, {f"model/{name}" for name in state.stage.shared})
    if not found and shared and fresh:
        found = _unequal(agreement, state, [pieces[n] for n in sorted(shared) if n in pieces])
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise ValueError(
            "; ".join([*found[:_SHOWN], *more])
            + ': names must be unique over all stages (datapath T13). Give stage=Stage(names={"layers.0": "layers.2"}) '
            "to say what a stage's modules are called in the whole model, or stage=Stage(shared=[...]) for what "
            "several stages train alike"
        )
    state.share(shared)
    if fresh:
        captured = state.capture()
        whole(
            agreement, state, captured, captured.only([])
        )  # else the first save would find what does not fit


def _look(piece: Piece, first: int) -> str:
    """Must be equal on all stages that have it; ranks count from the stage's `first`."""
    entry, layout = piece.entry, piece.entry.layout
    lies = f"{list(layout.mesh)} {[r - first for r in layout.ranks]} {[str(p) for p in layout.placements]}"
    return f"{entry.dtype}{list(entry.shape)} on {lies}"


def _different(shared: Mapping[str, Sequence[int]], told: Sequence[_Names], declared: set[str]) -> list[str]:
    found = []
    for name, stages in sorted(shared.items()):
        looks = [told[s].looks[name] for s in stages]
        if len(set(looks)) > 1:
            found.append(f"{name} is {looks[0]} on stage {stages[0]} and {looks[-1]} on stage {stages[-1]}")
        elif name not in declared and any(name in told[s].trains for s in stages):
            found.append(f"{name} trains on the stages {list(stages)}")
    return found


def _unequal(agreement: Agreement, state: State, pieces: Sequence[Piece]) -> list[str]:
    """Names of which two stages hold different bytes; every rank compares its shard with its counterparts."""
    places = state.places
    said = {p.entry.name: to_hex(shard_digest(p, places.rank)) for p in pieces}
    mine = _Names(looks=said, trains=[])
    told = [_Names.model_validate_json(data).looks for data in agreement.gather(mine.to_bytes())]
    found = set()
    for name in {name for looks in told for name in looks}:
        for place in range(places.per_stage):
            seen = {looks[name] for looks in told[place :: places.per_stage] if name in looks}
            if len(seen) > 1:
                found.add(f"{name} differs between the stages")
    return sorted(found)

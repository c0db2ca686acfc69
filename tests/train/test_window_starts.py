"""What a save inside a window must not hold: the place of a loader that was read ahead, a whole DTensor for a part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from in_process import Parts, rank_of
from rank_world import RankWorld
from torch import nn
from torch.distributed.tensor import DTensor, distribute_module
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer_sidecar.contract.plan import AccumulationSave, CheckpointPolicy, Plan
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.train import StatefulLoader
from trainer_sidecar.train.session import Session

pytestmark = pytest.mark.timeout(120)
TOPOLOGY = Topology(
    nodes=1,
    ranks_per_node=1,
    mesh=Mesh(dp=1),
    batch=Batch(global_batch_size=4, micro_batch_size=1, accumulation=4),
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path / "run")
    yield made
    made.close()


def in_windows(session: Session, parts: Parts, *, ends_inside_step: int = 0) -> list[tuple[int, int]]:
    """(step, sample) of each micro step. A save is asked for after the first one of step 2; the rank is gone behind the
    third one of `ends_inside_step`."""
    trained = []
    for window in session.windows():
        for x in window:
            trained.append((session.step + 1, int(x[0])))
            (parts.model(x / 100).sum() / 4).backward()
            if (session.step, session.micro) == (1, 0):
                session.request_save()
            session.micro_end()
            if ends_inside_step == session.step + 1 and session.micro == 3:
                return trained
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        session.step_end()
    return trained


@pytest.mark.parametrize("mode", [AccumulationSave.RAW, AccumulationSave.REDUCED])
def test_no_save_is_cut_into_a_window_that_a_loader_of_its_own_place_has_handed_out(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, mode: AccumulationSave
) -> None:
    policy = CheckpointPolicy(interval_steps=0, interval_seconds=0, accumulation_save=mode)

    def attempt(plan: Plan, *, ends_inside_step: int = 0) -> list[tuple[int, int]]:
        def make(*_: int) -> StatefulDataLoader:
            return StatefulDataLoader(torch.arange(100.0).reshape(-1, 1), batch_size=1)

        data, parts = StatefulLoader(make, ids=lambda batch: [int(batch[0])]), Parts()
        with rank_of(world, plan, monkeypatch), parts.session(data=data, total_steps=4) as session:
            return in_windows(session, parts, ends_inside_step=ends_inside_step)

    attempt(world.attempt(TOPOLOGY, checkpoint=policy), ends_inside_step=3)
    again = attempt(world.attempt(TOPOLOGY, world.commit_of(2), checkpoint=policy))
    assert again == [(step, 4 * (step - 1) + k) for step in (3, 4) for k in range(4)], "each sample once"


def test_a_window_that_began_with_distributed_buffers_can_be_saved_as_it_began(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`distribute_module` replicates buffers: a DTensor, of which a save writes this rank's part."""
    policy = CheckpointPolicy(interval_steps=0, interval_seconds=0)
    plan = world.attempt(TOPOLOGY, checkpoint=policy)
    with rank_of(world, plan, monkeypatch):
        mesh = Session.mesh_from_env("cpu")
        model = distribute_module(
            nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), mesh["dp"]
        )
        assert isinstance(model[1].running_mean, DTensor)
        parts = Parts(model)
        with parts.session(total_steps=2) as session:
            session._accumulation.note_start()
            began = session._accumulation._start
            assert began is not None
            before = began.buffers["1.running_mean"]
            assert not isinstance(before, DTensor)
            captured = session._state.capture()
            session._accumulation.rewind(captured, {})
            (piece,) = [p for p in captured.pieces if p.entry.name == "model/1.running_mean"]
            assert piece.local is before

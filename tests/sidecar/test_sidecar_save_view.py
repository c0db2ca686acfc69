"""What `/status` and the reporter read of a save while its ranks seal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from trainer_sidecar.contract.checkpoint import Progress, Seal, Slices, Tensors
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.sidecar.save import PartPhase, Save

RANKS = 2000


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def a_save() -> Save:
    topology = Topology(
        nodes=1,
        ranks_per_node=RANKS,
        mesh=Mesh(dp=RANKS),
        batch=Batch(global_batch_size=RANKS, micro_batch_size=1, accumulation=1),
    )
    seal = Seal(
        contract_version=1,
        epoch=1,
        save_id="ab" * 32,
        checkpoint_id="000000000001-0000000001-abababab",
        rank=0,
        generation=1,
        buffer="buffer-0",
        size=0,
        topology=topology,
        mesh_digest="",
        tensors=Tensors(names=[], dtypes=[], shapes=[]),
        slices=Slices(tensor=[], file=[], offset=[], length=[], start=[], size=[]),
        state_digest="",
        progress=Progress(step=1, epoch=0, samples=0, sample_digest="00"),
        reason=SaveReason.INTERVAL,
        rank_state=None,
    )
    return Save(seal, RANKS)


@pytest.mark.usefixtures("eager_threads")
def test_a_save_can_be_looked_at_while_its_ranks_seal() -> None:
    for _ in range(30):
        save = a_save()

        def seal_all(save: Save = save) -> None:
            for rank in range(RANKS):
                save.phases[rank] = PartPhase.UPLOADED

        sealing = threading.Thread(target=seal_all)
        sealing.start()
        seen = [0]
        while sealing.is_alive():
            seen.append(save.status(60.0, []).uploaded)
        sealing.join()
        assert seen == sorted(seen)
        assert save.uploaded == list(range(RANKS))


def test_a_stalled_save_is_one_whose_error_is_told_beside_it() -> None:
    save = a_save()
    save.errors["journal"] = "AccessDenied: came after the errors were read"
    assert save.status(60.0, []).phase != "Stalled"
    assert save.status(60.0, ["AccessDenied"]).phase == "Stalled"
    assert save.status(0.0, []).phase == "Stalled"

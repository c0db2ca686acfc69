"""Witness and verdict: what is recorded after a save, and what a resume is held against."""

from __future__ import annotations

import math

from trainer_sidecar.contract.checkpoint import Witness, WitnessStep
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.train.witness import ResumeVerifier, WitnessRecorder

PLACE = Topology(
    nodes=1,
    ranks_per_node=1,
    mesh=Mesh(dp=1),
    batch=Batch(global_batch_size=1, micro_batch_size=1, accumulation=1),
)


def step(number: int, loss: float = 1.0, batch: str = "") -> WitnessStep:
    return WitnessStep(step=number, loss=loss, batch_digest=batch or f"batch {number}")


def report() -> ResumeReport:
    return ResumeReport(
        epoch=9,
        attempt=2,
        checkpoint_id="c",
        step=10,
        topology_from=PLACE,
        topology_to=PLACE,
        checks=[Check(name="step", passed=True)],
    )


def witness(epoch: int = 5) -> Witness:
    return Witness(epoch=epoch, checkpoint_id="c", steps=[step(11), step(12), step(13)])


def verdict(steps: list[WitnessStep], seen: Witness | None) -> ResumeReport:
    verifier = ResumeVerifier(report(), seen, saved_epoch=5, count=3, tolerance=0.05)
    results = [verifier.saw(s) for s in steps]
    assert results[:-1] == [None] * (len(steps) - 1)
    assert results[-1] is not None
    return results[-1]


def test_a_witness_is_handed_out_once_complete_and_committed() -> None:
    recorder = WitnessRecorder(2)
    recorder.began("a", 10)
    recorder.saw(step(10))  # the step that was saved is no witness
    recorder.saw(step(11))
    recorder.saw(step(12))
    assert recorder.ready() == []
    recorder.committed("a")
    assert recorder.ready() == [("a", [step(11), step(12)])]
    assert recorder.ready() == []


def test_a_failed_save_gets_no_witness() -> None:
    recorder = WitnessRecorder(1)
    recorder.began("a", 10)
    recorder.failed("a")
    recorder.saw(step(11))
    recorder.committed("a")
    assert recorder.ready() == []


def test_equal_steps_verify_a_resume() -> None:
    found = verdict([step(11), step(12, 1.01), step(13)], witness())
    assert found.verified is True
    assert math.isclose(found.loss_delta or 0, 0.01)


def test_a_jump_of_the_loss_or_another_batch_does_not() -> None:
    assert verdict([step(11), step(12, 1.2), step(13)], witness()).verified is False
    assert verdict([step(11), step(12, 1.0, "other"), step(13)], witness()).verified is False
    assert verdict([step(11), step(12, math.nan), step(13)], witness()).verified is False


def test_a_witness_of_another_epoch_is_not_accepted() -> None:
    found = verdict([step(11, 7.0), step(12, 7.0), step(13, 7.0)], witness(epoch=6))
    assert found.verified is True
    assert found.loss_delta is None


def test_without_a_witness_the_exact_checks_and_finite_losses_decide() -> None:
    assert verdict([step(11), step(12), step(13)], None).verified is True
    assert verdict([step(11), step(12, math.inf), step(13)], None).verified is False

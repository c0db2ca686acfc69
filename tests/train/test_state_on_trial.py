"""Steps after a resume that differ from those seen after the save accuse the state; the journal takes it out once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Parts, rank_of
from rank_world import KEYS, OWNER, RankWorld, eventually, topology

from trainer_sidecar.contract.checkpoint import Witness, WitnessStep
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import (
    CheckpointPolicy,
    FingerprintClass,
    FingerprintPolicy,
    OnVerificationFailure,
    Plan,
    VerificationPolicy,
    WhenBusy,
)
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.restore_fault import parse_restore_fault
from trainer_sidecar.store.quarantine import accuse
from trainer_sidecar.store.reread import confirmed, state_tolerance
from trainer_sidecar.train.errors import ResumeDiverged, ResumeRefused
from trainer_sidecar.train.left import Tolerance
from trainer_sidecar.train.order import batch_digest
from trainer_sidecar.train.witness import ResumeVerifier

pytestmark = pytest.mark.timeout(120)
FALL_BACK = VerificationPolicy(on_failure=OnVerificationFailure.FALL_BACK)
WARN = VerificationPolicy(on_failure=OnVerificationFailure.WARN)
EVERY_FOURTH = CheckpointPolicy(interval_steps=4, interval_seconds=0, when_busy=WhenBusy.WAIT)
SAID = "the state was changed after the session had restored it.*load pretrained weights .* before Session.from_env"
SAME_CODE = {"RTJ_CODE_VERSION": "same"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("trial") / "run")
    yield made
    made.close()


@pytest.fixture(scope="module")
def points(world: RankWorld) -> dict[int, RestorePoint]:
    """Commits of steps 4, 8 and 11; the first two with a witness."""
    with pytest.MonkeyPatch.context() as patch:
        plan = world.attempt(topology(1, 4), checkpoint=EVERY_FOURTH)
        with rank_of(world, plan, patch, SAME_CODE):
            parts = Parts()
            with parts.session(total_steps=11) as session:
                parts.train(session)
    found = {step: world.commit_of(step) for step in (4, 8)}
    for point in found.values():
        key = KEYS.witness(point.checkpoint_id)
        eventually(lambda key=key: world.store.head(key) is not None, "the witness is written")
    return found


def resume(
    world: RankWorld,
    monkeypatch: pytest.MonkeyPatch,
    point: RestorePoint,
    policy: VerificationPolicy,
    spoil: float = 0.0,
) -> tuple[Plan, Any]:
    """Resume to step 11; `spoil` is added to a weight in the first forward pass, as lost state would look."""
    plan = world.attempt(topology(1, 4), point, EVERY_FOURTH, policy)
    with rank_of(world, plan, monkeypatch, SAME_CODE):
        parts = Parts()

        def lose(*_: Any) -> None:
            hook.remove()
            parts.model[0].weight.data.add_(spoil)

        hook = parts.model.register_forward_pre_hook(lose)
        with parts.session(total_steps=11) as session:
            parts.train(session)
    return plan, session.resume


def outcome_of(world: RankWorld, plan: Plan) -> Outcome:
    path = world.volume.outcome_dir(plan.epoch) / "rank-00000.json"
    return Outcome.model_validate_json(path.read_bytes())


def test_losses_that_match_the_witness_verify_the_state(
    world: RankWorld, points: dict[int, RestorePoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, report = resume(world, monkeypatch, points[8], FALL_BACK)
    assert report.verified


def test_a_policy_that_warns_trains_on_and_reports(
    world: RankWorld, points: dict[int, RestorePoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, report = resume(world, monkeypatch, points[8], WARN, spoil=3.0)
    assert report.verified is False
    assert outcome_of(world, plan).kind is OutcomeKind.FINISHED


def test_a_state_that_trains_otherwise_ends_the_attempt_and_is_quarantined_with_what_came_of_it(
    world: RankWorld, points: dict[int, RestorePoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = points[8]
    with pytest.raises(ResumeDiverged, match=r"StateMismatch: loss of step 9: expected .* tolerance 0.05"):
        resume(world, monkeypatch, point, FALL_BACK, spoil=3.0)
    plan = world.journal.refresh().attempts[-1]
    outcome = outcome_of(world, Plan.model_validate_json(world.volume.plan(plan.seq).read_bytes()))
    assert outcome.kind is OutcomeKind.RESUME_REFUSED
    fault = parse_restore_fault(f"pod x-0: {outcome.message}", point.checkpoint_id)
    assert fault is not None
    assert (fault.fault, fault.step) == ("state", 9)

    for wrong in ({"expected": "1e9"}, {"step": 900}, {"found": fault.expected}):
        assert confirmed(world.store, KEYS, point, fault.model_copy(update=wrong), 0.05) is None
    assert confirmed(world.store, KEYS, point, fault, state_tolerance(WARN)) is None
    found = confirmed(world.store, KEYS, point, fault, state_tolerance(FALL_BACK))
    assert found is not None
    entry = accuse(world.journal, found, owner=OWNER, writer="test", timeout=30)
    assert entry is not None
    assert (entry.fault, entry.covers_descendants) == ("state", True)
    history = world.journal.refresh()
    assert history.restorable(points[4].checkpoint_id)
    children = [m.checkpoint_id for m in history.manifests.values() if m.parent == point.checkpoint_id]
    assert children
    assert not any(history.restorable(c) for c in children)


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_loaded_after_the_restore_are_refused_by_name_and_accuse_no_checkpoint(
    world: RankWorld, points: dict[int, RestorePoint], monkeypatch: pytest.MonkeyPatch, through_data: bool
) -> None:
    plan = world.attempt(topology(1, 4), points[4], EVERY_FOURTH, FALL_BACK)
    with rank_of(world, plan, monkeypatch, SAME_CODE):
        parts, pretrained = Parts(), Parts().model
        with pytest.raises(ResumeRefused, match=SAID) as refused, parts.session(total_steps=11) as session:  # noqa: PT012
            if through_data:
                parts.model[2].weight.data[0, 3] += 1.0
            else:
                parts.model.load_state_dict(pretrained.state_dict())
            parts.train(session)
    assert not isinstance(refused.value, ResumeDiverged)
    changed = "1 of 16 tensors, model/2.weight among" if through_data else "4 of 16 tensors, model/0.bias, "
    assert changed in str(refused.value)
    outcome = outcome_of(world, plan)
    assert outcome.kind is OutcomeKind.RESUME_REFUSED
    assert parse_restore_fault(f"pod x-0: {outcome.message}", points[4].checkpoint_id) is None
    assert world.journal.refresh().restorable(points[4].checkpoint_id)


@pytest.mark.parametrize(
    ("policy", "accept", "passed"),
    [(WARN, (), False), (FALL_BACK, ("state.*",), True)],
    ids=["warn", "consent"],
)
def test_a_mode_that_does_not_come_back_bit_for_bit_passes_where_that_is_tolerated(
    world: RankWorld,
    points: dict[int, RestorePoint],
    monkeypatch: pytest.MonkeyPatch,
    policy: VerificationPolicy,
    accept: tuple[str, ...],
    passed: bool,
) -> None:
    """As `eval()` and `train()` of a schedule-free optimizer, before the first batch. Losses then accuse nobody."""
    plan = world.attempt(topology(1, 4), points[4], EVERY_FOURTH, policy)
    with rank_of(world, plan, monkeypatch, SAME_CODE):
        parts = Parts()
        with parts.session(total_steps=11, accept=accept) as session:
            for weight in parts.model.parameters():
                weight.data.mul_(1.7).div_(1.7)
            parts.model[2].weight.data.add_(3.0)  # so far that the losses are others
            parts.train(session)
    assert session.resume is not None
    (check,) = [c for c in session.resume.checks if c.name == "state at the first batch"]
    assert check.passed is passed
    assert "changed after the restore: " in check.detail
    assert "of 16 tensors, model/" in check.detail
    assert session.resume.verified is False
    rules = FingerprintPolicy(classes={"state.*": FingerprintClass.REFUSED})
    assert not Tolerance.of(plan.model_copy(update={"fingerprints": rules}), ("*",)).accepted
    assert outcome_of(world, plan).kind is OutcomeKind.FINISHED
    assert world.journal.refresh().restorable(points[4].checkpoint_id)


def test_another_global_batch_goes_on_from_the_same_sample_and_ends_with_the_same_epoch(
    world: RankWorld, points: dict[int, RestorePoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are others, so the witness says nothing of them, and those of before count by their samples."""
    plan = world.attempt(topology(1, 8), points[8], EVERY_FOURTH, FALL_BACK)
    with rank_of(world, plan, monkeypatch, SAME_CODE):
        parts = Parts()
        with parts.session(epochs=1) as session:
            parts.train(session)
    assert (session.step, session.samples) == (8 + 4, 64)
    assert session.resume is not None
    assert session.resume.verified
    first = next(c for c in session.resume.checks if c.name == "first batch")
    assert first.detail == "another one: the global batch was 4, is 8"


def test_a_script_that_feeds_itself_is_verified_by_each_step_once(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(point: RestorePoint | None) -> Any:
        plan = world.attempt(topology(1, 4, micro=4), point, EVERY_FOURTH, FALL_BACK)
        with rank_of(world, plan, monkeypatch, SAME_CODE):
            parts = Parts()
            with parts.session(data=None, total_steps=8) as session:
                while not session.should_stop:
                    loss = parts.model(torch.full((4, 1), session.step / 8)).square().mean()
                    loss.backward()
                    parts.optimizer.step()
                    parts.optimizer.zero_grad()
                    session.step_end(loss)
        return plan, session.resume

    plan, _ = run(None)
    (found,) = [c for c in world.commits() if c.epoch == plan.epoch and c.step == 4]
    key = KEYS.witness(found.checkpoint_id)
    eventually(lambda: world.store.head(key) is not None, "the witness is written")
    _, report = run(world.journal.refresh().restore_point_of(found.checkpoint_id))
    assert [c.name for c in report.checks if c.name.startswith("loss of")] == [
        f"loss of step {step}" for step in (5, 6, 7)
    ]
    assert report.verified


def verifier(
    report: ResumeReport, expected: float, found: float, *, samples: str = "d", spread: float = 0.0
) -> ResumeVerifier:
    steps = [WitnessStep(step=9, loss=expected, batch_digest=samples)]
    made = ResumeVerifier(report, Witness(epoch=1, checkpoint_id="c", steps=steps), 1, 1, 0.05, spread)
    assert made.saw(WitnessStep(step=9, loss=found, batch_digest=samples)) is not None
    return made


def test_only_the_state_itself_is_accused() -> None:
    """Another mesh draws other random numbers, another learning rate trains otherwise: no fault of the checkpoint."""
    where = topology(1, 4)
    report = ResumeReport(
        epoch=2, attempt=2, checkpoint_id="c", step=8, topology_from=where, topology_to=where, checks=[]
    )
    changed = Check(name="fingerprint training.lr", passed=True, detail="needs consent, given")
    assert verifier(report, 1.0, 2.0).accusation.startswith(
        "StateMismatch: loss of step 9: expected 1.0, found 2.0"
    )
    assert verifier(report, 1.0, float("nan")).accusation
    assert not verifier(report, 1.0, 1.04).accusation
    assert not verifier(report, float("nan"), 1.0).accusation
    assert not verifier(report.model_copy(update={"resharded": True}), 1.0, 2.0).accusation
    assert not verifier(report.model_copy(update={"checks": [changed]}), 1.0, 2.0).accusation
    other_batch = where.batch.model_copy(update={"micro_batch_size": 1, "accumulation": 4})
    split = report.model_copy(update={"topology_to": where.model_copy(update={"batch": other_batch})})
    assert not verifier(split, 1.0, 2.0).accusation


def test_samples_that_nobody_can_name_accuse_no_state() -> None:
    """A script that feeds itself may have fed others: the session cannot tell."""
    where = topology(1, 4)
    report = ResumeReport(
        epoch=2, attempt=2, checkpoint_id="c", step=8, topology_from=where, topology_to=where, checks=[]
    )
    nameless = batch_digest(np.empty(0, np.int64))
    assert not verifier(report, 1.0, 2.0, samples=nameless).accusation
    told = WitnessStep(step=9, loss=1.0, batch_digest="d")
    made = ResumeVerifier(report, Witness(epoch=1, checkpoint_id="c", steps=[told]), 1, 1, 0.05)
    done = made.saw(WitnessStep(step=9, loss=2.0, batch_digest="others"))
    assert done is not None
    assert done.verified is False
    assert not made.accusation


def test_noise_around_a_loss_of_zero_accuses_no_state() -> None:
    where = topology(1, 4)
    report = ResumeReport(
        epoch=2, attempt=2, checkpoint_id="c", step=8, topology_from=where, topology_to=where, checks=[]
    )
    assert not verifier(report, 1e-9, -2e-9, spread=0.1).accusation
    assert verifier(report, 1e-9, 0.1, spread=0.1).accusation
    assert verifier(report, 1.0, 2.0, spread=float("nan")).accusation
    assert verifier(report, 1.0, float("nan"), spread=0.1).accusation

"""A blocked transition opens by a drill that has passed, for its fingerprints, and closes with others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_restore_point_bad import OneStore, order, world

from rtj_operator.api.spec import CompatibilityEntry
from rtj_operator.conditions import Reason
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.fencing import FenceOrder, fence
from trainer_sidecar.contract.checkpoint import fingerprints_digest
from trainer_sidecar.contract.journal import Manifest, Owner
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import FingerprintPolicy
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.store.drills import DrillPassed, record_drill
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.quarantine import quarantine

OWN = RunKeys("ns", "sft")
BLOCKED = CompatibilityEntry.model_validate(
    {"from": {"dp": "*"}, "to": {"dp": "*"}, "status": "blocked_until_drill_passes"}
)
DRILL = Owner(namespace="ns", name="probe", uid="uid-probe")


class Run:
    """A run with one commit of dp 4, whose job wants dp 2 and blocks every change of dp."""

    def __init__(self) -> None:
        self.stores = OneStore(MemoryStore())
        self.journal = Journal(self.stores.store, OWN)
        first = order("nonce-1")
        request = world.request(
            owner=Owner(namespace="ns", name=first.spec.name, uid=first.spec.uid), plan_for=lambda *_: saved()
        )
        fenced = world.fence_and_pick(self.journal, request)
        self.commit: Manifest = world.save(self.stores.store, fenced, 1, self.journal, OWN)

    def order(self, nonce: str, **declared: str) -> FenceOrder:
        made = order(nonce)
        policy = FingerprintPolicy(declared=declared)
        spec = replace(made.spec, matrix=(BLOCKED,), fingerprints=policy)
        return replace(made, spec=spec, known_attempts=1)

    def fence(self, nonce: str, **declared: str) -> Topology:
        return fence(self.stores, self.order(nonce, **declared))[1].topology

    def refusal(self, nonce: str, **declared: str) -> str:
        with pytest.raises(FenceTrouble) as trouble:
            self.fence(nonce, **declared)
        assert trouble.value.reason is Reason.TRANSITION_BLOCKED
        return str(trouble.value)

    def drilled(self, to: Topology, fingerprints: dict[str, str], **changes: Any) -> None:
        passed = DrillPassed(
            self.commit.checkpoint_id, "uid-probe", "probe", saved(), to, fingerprints_digest(fingerprints)
        )
        self.journal.read()
        record_drill(self.journal, replace(passed, **changes), owner=DRILL, writer="operator/test")


def saved() -> Topology:
    return world.topology(4)


@pytest.fixture
def run() -> Run:
    return Run()


def wanted(run: Run) -> Topology:
    """What the job's spec asks for."""
    from rtj_operator.mesh import plan_size

    made = run.order("x")
    found = plan_size(made.spec.mesh, made.nodes)
    assert isinstance(found, Topology)
    return found


def test_a_blocked_transition_is_refused_until_a_drill_of_it_has_passed(run: Run) -> None:
    assert "blocked_until_drill_passes" in run.refusal("nonce-2")
    run.drilled(wanted(run), {})
    assert run.fence("nonce-2").mesh == wanted(run).mesh


def test_a_drill_of_another_mesh_or_with_other_fingerprints_opens_nothing(run: Run) -> None:
    run.drilled(world.topology(1), {}, drill="uid-a")
    run.drilled(wanted(run), {"tokenizer": "sha256:00"}, drill="uid-b")
    run.refusal("nonce-2")


def test_fingerprints_that_the_platform_declares_anew_close_it(run: Run) -> None:
    run.drilled(wanted(run), {})
    run.refusal("nonce-2", tokenizer="sha256:01")
    assert run.fence("nonce-3").mesh == wanted(run).mesh


def test_a_drill_of_a_checkpoint_that_is_quarantined_now_proves_nothing(run: Run) -> None:
    run.drilled(wanted(run), {})
    attempt = run.journal.read().newest
    assert attempt is not None
    later = world.request("nonce-9", owner=attempt.owner)
    again = world.fence_and_pick(run.journal, later)
    world.save(run.stores.store, again, 2, run.journal, OWN)
    quarantine(run.journal, run.commit.checkpoint_id, "bytes", "flipped", owner=DRILL, writer="operator/test")
    run.refusal("nonce-2")


def test_a_drill_is_recorded_once_and_read_back_from_the_bucket_alone(run: Run) -> None:
    for _ in range(2):
        run.drilled(wanted(run), {})
    entries = Journal(run.stores.store, OWN).read().entries
    assert [e.kind for e in entries].count("Verified") == 1

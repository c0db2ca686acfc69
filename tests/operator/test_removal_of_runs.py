"""`deletionPolicy: Delete` in the operator: finalizer first, pods before objects, and always a way out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import KEY, Cluster, Died, run_until_planned
from operator_values import NOW, Situation, at, job, pod, pods, running
from test_causes import failing
from test_restore_point_bad import order, world

from rtj_operator import remover
from rtj_operator.api import JobStatus, Phase
from rtj_operator.api.names import FINALIZER
from rtj_operator.api.policies import DeletionPolicy
from rtj_operator.decide.actions import (
    DeleteJob,
    DeleteObject,
    DeletePods,
    FenceAndPublish,
    PublishOrder,
    RemoveRun,
    SetFinalizer,
    WriteStatus,
)
from rtj_operator.faults import AFTER_REMOVAL
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.fencing import Stores, conflict_of, fence
from rtj_operator.kube import EVENTS, JOBS, PODS, RTJ, Conflict, Invalid
from rtj_operator.reconcile import TryLater
from trainer_sidecar.contract.journal import Attempt, Owner, Retired
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import AccessDeniedError
from trainer_sidecar.store.fence import Fenced, Fork, fence_and_pick
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.removal import Removal

RUN = RunKeys("ns", "sft")


def deleting(situation: Situation | None = None, **meta: Any) -> Situation:
    """A job that trained, whose object is being deleted with the policy Delete."""
    begun = situation or running()
    spec = begun.spec.model_copy(update={"deletion_policy": DeletionPolicy.DELETE})
    when = datetime.fromtimestamp(NOW, UTC)
    changes = {"deletion_timestamp": when, "finalizers": ["other/one", FINALIZER], **meta}
    return replace(begun, spec=spec, meta=begun.meta.model_copy(update=changes))


def test_the_finalizer_stands_before_anything_is_placed_and_goes_with_the_policy() -> None:
    new = deleting(Situation(), deletion_timestamp=None, finalizers=[])
    assert new.decide().actions == (SetFinalizer(True),)
    held = deleting(Situation(), deletion_timestamp=None)
    assert isinstance(held.decide().actions[0], WriteStatus), "then it goes on as ever"
    assert replace(held, spec=Situation().spec).decide().actions == (SetFinalizer(False),)
    refused = replace(new, problems=("MeshImpossible: no",), wanted=None)
    assert SetFinalizer(True) not in refused.decide().actions, "a spec that never ran has nothing to hold"


def test_a_job_that_runs_already_is_looked_after_before_it_gets_its_finalizer() -> None:
    trains = deleting(deletion_timestamp=None, finalizers=[])
    trains = trains.after(trains.decide())
    assert trains.decide().actions == (SetFinalizer(True),), "nothing else is to be done"
    failed = trains.with_nonce("nonce-2").seeing(jobs=1, pods=failing())
    assert any(isinstance(a, FenceAndPublish) for a in failed.decide().actions)
    assert SetFinalizer(True) not in failed.decide().actions


def test_a_job_that_runs_is_looked_after_before_its_finalizer_goes_off() -> None:
    """The right to patch the object may be gone: a rank that failed and a suspend do not wait for it."""
    trains = deleting(deletion_timestamp=None).specified(deletionPolicy="Retain")
    trains = trains.after(trains.decide())
    assert trains.decide().actions == (SetFinalizer(False),), "nothing else is to be done"
    failed = trains.with_nonce("nonce-2").seeing(jobs=1, pods=failing()).decide()
    assert any(isinstance(a, FenceAndPublish) for a in failed.actions)
    stops = trains.specified(suspend=True).decide()
    assert any(isinstance(a, PublishOrder) for a in stops.actions)
    assert SetFinalizer(False) not in (*failed.actions, *stops.actions)
    policies = {"deletionPolicy": "Delete", "ttlSecondsAfterFinished": 0}
    ended = {"phase": Phase.COMPLETE, "ended_at": datetime.fromtimestamp(NOW, UTC)}
    over = deleting(deletion_timestamp=None).specified(**policies)
    over = replace(over, status=over.status.model_copy(update=ended))
    assert over.decide().actions == (SetFinalizer(False),), (
        "before the object is deleted: its checkpoints stay"
    )


def test_pods_go_before_checkpoints_and_then_a_part_of_the_run_goes() -> None:
    first = deleting().decide()
    kinds = [type(a) for a in first.actions]
    assert kinds == [WriteStatus, DeletePods, DeleteJob]
    assert first.status.phase is Phase.DELETING
    assert "2 pods still to end before checkpoints are deleted (sft-p1-0, sft-p1-1)" in str(
        first.status.message
    )
    assert "set spec.deletionPolicy to Retain to let the object go" in str(first.status.message)
    ending = deleting().after(first)
    leaving = tuple(replace(p, deleting=True) for p in pods(2))
    wait = ending.seeing(jobs=(job(1, 2, deleting=True),), pods=leaving).decide()
    assert not any(isinstance(a, RemoveRun) for a in wait.actions)
    gone = ending.seeing(jobs=(), pods=()).decide()
    assert [type(a) for a in gone.actions] == [WriteStatus, RemoveRun]
    assert gone.actions[1] == RemoveRun(known_attempts=1)
    assert [e.reason for e in gone.events] == ["DeletingCheckpoints"]


@pytest.mark.parametrize("left", [{"node_lost": True}, {"overdue_seconds": 31.0}])
def test_pods_that_nobody_ends_are_left_behind_the_fence(left: dict[str, Any]) -> None:
    stuck = deleting().seeing(jobs=(), pods=(pod(0, deleting=True, **left),))
    assert any(isinstance(a, RemoveRun) for a in stuck.decide().actions)


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
def test_a_job_that_never_began_or_may_keep_its_checkpoints_is_let_go_at_once(policy: str) -> None:
    base = deleting() if policy == "Retain" else deleting(Situation())
    spec = base.spec.model_copy(update={"deletion_policy": DeletionPolicy(policy)})
    assert replace(base, spec=spec).decide().actions == (SetFinalizer(False),)


def test_a_ttl_takes_the_object_and_never_the_checkpoints() -> None:
    done = running().status.model_copy(update={"phase": Phase.COMPLETE, "ended_at": at(-100)})
    over = replace(deleting(deletion_timestamp=None), status=done)
    over = replace(over, spec=over.spec.model_copy(update={"ttl_seconds_after_finished": 60})).still(60)
    assert over.decide().actions == (SetFinalizer(False),)
    free = replace(over, meta=over.meta.model_copy(update={"finalizers": []}))
    assert DeleteObject() in free.decide().actions


def test_without_our_finalizer_or_under_another_controller_nothing_is_touched() -> None:
    assert deleting(finalizers=["other/one"]).decide().actions == ()
    elsewhere = deleting()
    other = elsewhere.spec.model_copy(update={"managed_by": "else/where"})
    assert replace(elsewhere, spec=other).decide().actions == ()


def test_a_store_that_the_operator_does_not_allow_is_never_touched_and_that_is_said() -> None:
    sentence = "StoreNotAllowed: store.url s3://b/x is not below any of the allowed prefixes"
    blocked = replace(deleting(), problems=(sentence,), wanted=None).decide()
    assert not any(isinstance(a, RemoveRun) for a in blocked.actions)
    (event,) = blocked.events
    assert (event.reason, event.warning) == ("DeletionBlocked", True)
    assert (
        "store.url s3://b/x is not below any of the allowed prefixes; or set spec.deletionPolicy to Retain"
        in (event.message)
    )
    degraded = next(c for c in blocked.status.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.message) == ("True", event.message)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A job with the policy Delete that trains and has committed twice."""
    made = Cluster(tmp_path / "store")
    raw = made.kube.objects[(RTJ.plural, *KEY)]
    raw["spec"]["deletionPolicy"] = "Delete"
    raw["metadata"]["finalizers"] = ["other/one"]
    operator = made.operator()
    made.step(operator)
    assert raw["metadata"]["finalizers"] == ["other/one", FINALIZER]
    assert not made.kube.objects.keys() - {(RTJ.plural, *KEY)}, "before any Job"
    run_until_planned(made, operator)
    journal = Journal(made.stores.store, RUN)
    history = journal.read()
    assert history.newest is not None
    (attempt,) = history.attempts
    fenced = Fenced(1, attempt.seq, None, attempt.topology, None, attempt)
    for step in (1, 2):
        world.save(made.stores.store, fenced, step, journal, RUN)
    return made


def deleted(cluster: Cluster) -> None:
    """The user deletes the object; our fake has no kubelets, so pods end as they are told to."""
    raw = cluster.kube.objects[(RTJ.plural, *KEY)]
    raw["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    cluster.kube.put(RTJ, raw)


def finish(cluster: Cluster, operator: Any, steps: int = 6) -> None:
    """Reconciles until the finalizer is off, as the API server then removes the object."""
    for _ in range(steps):
        cluster.step(operator)
        if FINALIZER not in cluster.kube.objects[(RTJ.plural, *KEY)]["metadata"]["finalizers"]:
            return


def finalizers(cluster: Cluster) -> list[str]:
    found: list[str] = cluster.kube.objects[(RTJ.plural, *KEY)]["metadata"]["finalizers"]
    return found


def events(cluster: Cluster) -> dict[str, str]:
    return {
        b["reason"]: b["note"] for (kind, _, _), b in cluster.kube.objects.items() if kind == EVENTS.plural
    }


def objects(cluster: Cluster) -> set[str]:
    return {o.key for o in cluster.stores.store.list(RUN.prefix) if "/journal/" not in o.key}


def test_a_deleted_job_takes_its_checkpoints_with_it(cluster: Cluster) -> None:
    assert objects(cluster)
    deleted(cluster)
    finish(cluster, cluster.operator())
    assert finalizers(cluster) == ["other/one"], "only ours goes"
    assert objects(cluster) == set()
    assert not [k for k in cluster.kube.objects if k[0] in (JOBS.plural, PODS.plural)]
    assert [type(e) for e in cluster.history().entries[-2:]] == [Attempt, Retired]
    told = events(cluster)
    assert "2 checkpoints deleted; its journal stays" in told["CheckpointsDeleted"]
    assert "CheckpointsKept" not in told
    assert "ns/sft/ in s3://bucket/team" in told["CheckpointsDeleted"]


def in_parts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remover, "remove_run", partial(remover.remove_run, most=1))


def test_a_removal_in_parts_tells_how_many_went_in_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts_of_one(monkeypatch)
    deleted(cluster)
    finish(cluster, cluster.operator())
    assert ": 2 checkpoints deleted" in events(cluster)["CheckpointsDeleted"]


def test_retain_between_two_parts_keeps_what_is_not_retired_yet(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts_of_one(monkeypatch)
    deleted(cluster)
    operator = cluster.operator()
    while not cluster.history().retired:
        cluster.step(operator)
    cluster.kube.objects[(RTJ.plural, *KEY)]["spec"]["deletionPolicy"] = "Retain"
    finish(cluster, operator)
    history = cluster.history()
    (kept,) = (i for i in history.manifests if history.restorable(i))
    assert kept == list(history.manifests)[-1], "the newest"
    assert any(kept in key for key in objects(cluster))


def test_retain_that_comes_after_the_decision_stops_the_removal(cluster: Cluster) -> None:
    """The job may have stood in line for a thread."""
    deleted(cluster)
    operator = cluster.operator()
    cluster.step(operator)
    before, get, reads = objects(cluster), cluster.kube.get, 0

    async def changing(kind: Any, namespace: Any, name: str) -> Any:
        nonlocal reads
        reads += kind is RTJ
        if reads == 2:
            cluster.kube.objects[(RTJ.plural, *KEY)]["spec"]["deletionPolicy"] = "Retain"
        return await get(kind, namespace, name)

    cluster.kube.get = changing  # type: ignore[method-assign]
    cluster.step(operator)
    assert reads == 2
    assert objects(cluster) == before
    assert len(cluster.history().attempts) == 1, "not even fenced"
    finish(cluster, operator)
    assert finalizers(cluster) == ["other/one"]


def test_somebody_who_writes_while_the_finalizer_goes_off_loses_no_event(cluster: Cluster) -> None:
    deleted(cluster)
    patch, refused = cluster.kube.patch, 0

    async def racing(kind: Any, namespace: str, name: str, body: Any, **how: Any) -> Any:
        nonlocal refused
        if kind is RTJ and refused < 2:
            refused += 1
            raise Conflict("somebody wrote", status=409)
        return await patch(kind, namespace, name, body, **how)

    cluster.kube.patch = racing  # type: ignore[method-assign]
    finish(cluster, cluster.operator())
    assert refused == 2
    assert ": 2 checkpoints deleted" in events(cluster)["CheckpointsDeleted"]


def test_trouble_goes_from_the_status_once_a_part_has_gone_well(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted(cluster)
    operator = cluster.operator()
    good = remover.remove_run

    def denied(*_: Any, **__: Any) -> Any:
        raise AccessDeniedError("s3://bucket/team: denied: allow s3:DeleteObject")

    monkeypatch.setattr(remover, "remove_run", denied)
    cluster.step(operator)
    with pytest.raises(TryLater, match="denied"):
        cluster.step(operator)
    assert cluster.status()["reason"] == "StoreAccessDenied"
    monkeypatch.setattr(remover, "remove_run", partial(good, most=1))
    cluster.step(operator)
    status = JobStatus.model_validate(cluster.status())
    assert FINALIZER in finalizers(cluster), "one of two is left"
    assert (status.phase, status.reason) == (Phase.DELETING, "DeletingCheckpoints")
    assert next(c for c in status.conditions if c.type == "Degraded").status == "False"
    finish(cluster, operator)
    assert objects(cluster) == set()


def test_pods_that_nobody_could_end_are_named_since_they_may_upload_still() -> None:
    stuck = deleting().seeing(jobs=(), pods=(pod(0, deleting=True, node_lost=True),))
    (action,) = (a for a in stuck.decide().actions if isinstance(a, RemoveRun))
    assert action.left_behind == ("sft-p1-0",)
    _, kept = remover.said(Removal(2, 9, total=2), order("nonce-1").spec, action.left_behind)
    assert kept.reason == "CheckpointsKept"
    assert "sft-p1-0 could not be ended and may upload still" in kept.message
    assert "delete what lies below ns/sft/checkpoints/ once they have ended" in kept.message


def test_an_operator_that_dies_while_it_deletes_is_followed_by_one_that_goes_on(cluster: Cluster) -> None:
    deleted(cluster)
    with pytest.raises(Died):
        finish(cluster, cluster.operator(AFTER_REMOVAL))
    assert FINALIZER in finalizers(cluster)
    finish(cluster, cluster.operator())
    assert finalizers(cluster) == ["other/one"]
    assert objects(cluster) == set()
    assert sum(isinstance(e, Attempt) for e in cluster.history().entries) == 2, "fenced once"


def test_a_store_that_refuses_is_said_once_tried_again_and_retain_lets_go(cluster: Cluster) -> None:
    class Denies(Stores):
        def get(self, spec: Any, credentials: Any) -> Any:
            raise AccessDeniedError(
                "s3://bucket/team: delete of ns/sft/frozen/ab: denied: allow s3:DeleteObject"
            )

    deleted(cluster)
    good, cluster.stores = cluster.stores, Denies()  # type: ignore[assignment]
    operator = cluster.operator()
    cluster.step(operator)
    for _ in range(3):
        with pytest.raises(TryLater, match="denied"):
            cluster.step(operator)
    writes = len(cluster.kube.log)
    with pytest.raises(TryLater, match="denied"):
        cluster.step(operator)
    assert len(cluster.kube.log) == writes, "a retry that fails alike writes nothing"
    status = JobStatus.model_validate(cluster.status())
    degraded = next(c for c in status.conditions if c.type == "Degraded")
    assert (status.phase, degraded.reason) == (Phase.DELETING, "StoreAccessDenied")
    assert (
        "allow s3:DeleteObject. It is tried again; or set spec.deletionPolicy to Retain" in degraded.message
    )
    assert "allow s3:DeleteObject" in events(cluster)["DeletionBlocked"]
    raw = cluster.kube.objects[(RTJ.plural, *KEY)]
    raw["spec"]["deletionPolicy"] = "Retain"
    cluster.step(operator)
    assert finalizers(cluster) == ["other/one"]
    cluster.stores = good
    assert objects(cluster), "everything is kept"


def test_a_status_that_the_crd_refuses_holds_no_deletion_up(cluster: Cluster) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise Invalid("PATCH: 422", status=422, sentence="phase: Unsupported value: Deleting")

    deleted(cluster)
    cluster.kube.write_status = refuse  # type: ignore[method-assign]
    operator = cluster.operator()
    for _ in range(2):
        with pytest.raises(TryLater, match="Unsupported value: Deleting"):
            finish(cluster, operator)
    assert finalizers(cluster) == ["other/one"]
    assert objects(cluster) == set()
    assert "CheckpointsDeleted" in events(cluster)


def test_what_a_fork_needs_stays_with_the_reason_in_an_event_and_the_object_goes(cluster: Cluster) -> None:
    fork = Journal(cluster.stores.store, RunKeys("ns", "fork"))
    other = Owner(namespace="ns", name="fork", uid="uid-fork")
    began = fence_and_pick(fork, world.request("fork-1", owner=other, fork=Fork("ns", "sft")))
    deleted(cluster)
    finish(cluster, cluster.operator())
    assert finalizers(cluster) == ["other/one"]
    assert began.restore is not None
    held = f"checkpoint {began.restore.checkpoint_id} and the frozen weights it names: held by run ns/fork"
    assert held in events(cluster)["CheckpointsKept"]
    assert fence_and_pick(fork, world.request("fork-2", owner=other)).restore == began.restore


def test_a_run_that_another_object_adopted_is_left_to_it(cluster: Cluster) -> None:
    other = Owner(namespace="ns", name="heir", uid="uid-heir")
    journal = Journal(cluster.stores.store, RUN)
    fence_and_pick(journal, world.request("heir-1", owner=other, adopt=True))
    before = objects(cluster)
    deleted(cluster)
    finish(cluster, cluster.operator())
    assert objects(cluster) == before
    told = events(cluster)
    assert "it belongs to local/ns/heir (uid uid-heir) now" in told["CheckpointsKept"]
    assert "CheckpointsDeleted" not in told


def test_a_save_that_was_on_its_way_does_not_outlive_the_removal(cluster: Cluster) -> None:
    (attempt,) = cluster.history().attempts
    fenced = Fenced(1, attempt.seq, None, attempt.topology, None, attempt)
    world.Save(cluster.stores.store, fenced, 3, keys=RUN).upload(None)
    deleted(cluster)
    finish(cluster, cluster.operator())
    assert objects(cluster) == set()


def test_who_takes_the_run_id_of_a_removed_run_is_told_that_it_is_used_up(cluster: Cluster) -> None:
    deleted(cluster)
    finish(cluster, cluster.operator())
    heir = order("nonce-heir").spec
    sentence = conflict_of(cluster.stores, replace(heir, uid="uid-heir"), {})
    assert "with which its checkpoints were deleted; a run id is used once: delete this object" in sentence
    assert "another checkpoint.runId (left out it is the object's name), such as sft-2" in sentence
    wants = order("nonce-heir")
    with pytest.raises(FenceTrouble) as refused:
        fence(cluster.stores, replace(wants, spec=replace(heir, uid="uid-heir"), adopt=True))
    assert (refused.value.reason, str(refused.value), refused.value.final) == ("RunExists", sentence, True)

"""A drill from its object to the entry in the run's journal: sandbox, verdict, quarantine, and operators that die."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest
from drill_world import LOSSES, NOW, RUN, SANDBOX, DrillCluster
from fake_cluster import KEY

from rtj_operator.api.drill import DrillPhase
from rtj_operator.conditions import Reason
from rtj_operator.drills.words import DrillReason
from rtj_operator.kube import DRILLS, EVENTS, JOBS, RTJ, Kind, Object, WebhookFailed
from rtj_operator.reconcile import TryLater
from trainer_sidecar.contract.drill import ReadResult
from trainer_sidecar.contract.journal import Verified
from trainer_sidecar.contract.report import Check
from trainer_sidecar.contract.restore_fault import Evidence, RestoreFault


@pytest.fixture
def cluster(tmp_path: Path) -> DrillCluster:
    return DrillCluster(tmp_path / "store")


def verified(cluster: DrillCluster) -> list[Verified]:
    return [e for e in cluster.history_of().entries if isinstance(e, Verified)]


def test_a_drill_restores_in_a_sandbox_and_its_verdict_stands_in_the_run_s_journal(
    cluster: DrillCluster,
) -> None:
    first = cluster.commits[0]
    cluster.put_drill(nodes=1, steps=2, lossTolerance="0.01")
    cluster.run(6)
    sandbox = cluster.sandbox()
    assert sandbox is not None
    spec, plan = sandbox["spec"], cluster.sandbox_plan()
    assert (spec["nodes"], spec["deletionPolicy"], spec["checkpoint"]["intervalSeconds"]) == (1, "Delete", 0)
    assert plan.run_id == "probe-drill-uid-probe", "a run of its own: it cannot reach the drilled one"
    assert plan.restore is not None
    assert plan.restore.checkpoint_id == first.checkpoint_id, "the newer one has no witness yet"
    witness = cluster.stores.store.get(RUN.witness(first.checkpoint_id))
    assert plan.witness_sha256 == hashlib.sha256(witness).hexdigest(), (
        "a fork compares with its parent's witness"
    )
    assert (plan.verification.steps, plan.verification.loss_tolerance) == (2, 0.01)
    assert list(cluster.history_of().holds) == [first.checkpoint_id], "retention cannot take it meanwhile"
    cluster.verdict(True)
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.PASSED, DrillReason.MATCHED)
    assert [(c.name, c.expected, c.found) for c in status.checks] == [("loss of step 2", "0.5", "0.5001")]
    assert (status.mesh_from, status.mesh, status.loss_delta) == ("dp2xtp1xpp1", "dp1xtp1xpp1", "0.0002")
    assert status.recovery_seconds is not None
    (entry,) = verified(cluster)
    assert (entry.seq, entry.checkpoint_id, entry.level) == (
        status.journal_entry,
        first.checkpoint_id,
        "resume",
    )
    assert entry.topology_from is not None
    assert entry.topology_to is not None
    assert (entry.topology_from.mesh.dp, entry.topology_to.mesh.dp) == (2, 1)
    assert entry.fingerprints_sha256
    assert cluster.history_of().verified[first.checkpoint_id] == entry
    assert cluster.sandbox() is None
    assert cluster.events() == [("ResumableTrainingJob", "DrillPassed"), ("ResumeDrill", "DrillPassed")]
    assert not [s for m in cluster.jobs.metrics.collect() for s in m.samples], (
        "an alert is never about a sandbox"
    )
    assert len(cluster.history_of().attempts) == 1, "the run itself was never touched"


def test_steps_that_differ_fail_the_drill_and_accuse_no_checkpoint(cluster: DrillCluster) -> None:
    cluster.put_drill()
    cluster.run(6)
    cluster.verdict(False, Check(name="loss of step 2", passed=False, expected=0.5, found=0.9), *LOSSES)
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.DIFFERS)
    assert "loss of step 2: expected 0.5, found 0.9" in (status.message or "")
    assert not status.quarantined
    assert not verified(cluster)
    assert not cluster.history_of().quarantined
    assert cluster.events() == [("ResumableTrainingJob", "DrillFailed"), ("ResumeDrill", "DrillFailed")]


def test_a_checkpoint_that_ranks_find_damaged_is_read_again_and_quarantined_in_the_run(
    cluster: DrillCluster,
) -> None:
    first = cluster.commits[0]
    cluster.put_drill()
    cluster.run(6)
    cluster.shard(first).chmod(0o644)
    cluster.shard(first).write_bytes(b"x" * 16)
    key = RUN.shard(first.checkpoint_id, 0)
    cluster.refuse(
        f"ChecksumMismatch: {Evidence(key, 'SHA-256 aa in leaf 0', 'SHA-256 bb', 2)} (checkpoint x)"
    )
    cluster.run(6)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.CHECKPOINT_BAD), status.message
    assert "rank-00000.distcp" in (status.message or "")
    quarantine = cluster.history_of().quarantined[first.checkpoint_id]
    assert (status.quarantined, status.journal_entry) == (True, quarantine.seq)
    assert (quarantine.fault, quarantine.file) == ("bytes", "rank-00000.distcp")
    assert quarantine.owner.name == "probe"
    newest = cluster.history_of().newest_restorable
    assert newest is not None
    assert newest.checkpoint_id == cluster.commits[1].checkpoint_id


def test_a_missing_object_is_found_before_any_rank_starts(cluster: DrillCluster) -> None:
    newest = cluster.commits[1]
    cluster.shard(newest, 1).unlink()
    cluster.put_drill(checkpoint=newest.checkpoint_id)
    cluster.run()
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.CHECKPOINT_BAD), status.message
    assert cluster.history_of().quarantined[newest.checkpoint_id].fault == "missing"


def test_an_accusation_that_the_operator_does_not_find_quarantines_nothing(cluster: DrillCluster) -> None:
    first = cluster.commits[0]
    cluster.put_drill()
    cluster.run(6)
    key = RUN.shard(first.checkpoint_id, 0)
    for _ in range(2):  # the second try is the last one
        cluster.refuse(
            f"ChecksumMismatch: {Evidence(key, 'SHA-256 aa in leaf 0', 'SHA-256 bb', 2)} (checkpoint x)"
        )
        cluster.run(6)
    assert not cluster.history_of().quarantined
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, Reason.TOO_MANY_FAILURES), status.message


@pytest.mark.parametrize("fatal", range(1, 22))
def test_an_operator_that_dies_after_any_write_leaves_one_sandbox_and_one_verdict(
    tmp_path: Path, fatal: int
) -> None:
    cluster = DrillCluster(tmp_path / "store")
    cluster.put_drill()
    cluster.fatal = fatal
    cluster.run(10)
    cluster.verdict(True)
    cluster.run(10)
    assert cluster.fatal <= 0, "the fault has fired"
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.PASSED, DrillReason.MATCHED)
    assert [e.seq for e in verified(cluster)] == [status.journal_entry]
    assert cluster.kube.log.count(("create", RTJ.plural, SANDBOX[1])) == 1
    assert cluster.sandbox() is None


@pytest.mark.parametrize("fatal", range(1, 8))
def test_an_operator_that_dies_while_it_quarantines_does_so_once(tmp_path: Path, fatal: int) -> None:
    cluster = DrillCluster(tmp_path / "store")
    newest = cluster.commits[1]
    cluster.put_drill(checkpoint=newest.checkpoint_id)
    cluster.run(6)
    cluster.shard(newest, 1).unlink()
    key = RUN.shard(newest.checkpoint_id, 1)
    cluster.refuse(f"NotFound: {Evidence(key, 'an object', 'nothing', 2)} (checkpoint x)")
    cluster.fatal = fatal
    cluster.run()
    assert cluster.fatal <= 0, "the fault has fired"
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.CHECKPOINT_BAD)
    assert cluster.history_of().quarantined[newest.checkpoint_id].seq == status.journal_entry
    assert sum(e.kind == "Quarantined" for e in cluster.history_of().entries) == 1


def test_drills_of_a_job_run_one_after_the_other(cluster: DrillCluster) -> None:
    cluster.put_drill()
    cluster.put_drill("second")
    cluster.run(4)
    waits = cluster.drill("second").status
    assert (waits.phase, waits.reason) == (DrillPhase.PENDING, DrillReason.WAITING_FOR_TURN)
    assert waits.started_at is None, "its deadline counts from its turn"
    cluster.run(3)
    cluster.verdict(True)
    cluster.run(5)
    assert cluster.drill("second").status.phase is DrillPhase.RUNNING


def test_a_drill_without_a_result_fails_at_its_deadline_with_what_it_waited_for(
    cluster: DrillCluster,
) -> None:
    cluster.put_drill(deadlineSeconds=60)
    cluster.run(5)
    cluster.now = NOW + 61
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.DEADLINE_EXCEEDED)
    assert "probe-drill: attempt 1" in (status.message or "")
    assert cluster.sandbox() is None
    assert not cluster.history_of().quarantined


def test_a_job_that_is_edited_or_made_anew_meanwhile_changes_nothing_of_a_drill_that_runs(
    cluster: DrillCluster,
) -> None:
    cluster.put_drill(nodes=1)
    cluster.run(6)
    cluster.edit_job(batch={"globalBatchSize": 7})
    cluster.verdict(True)
    cluster.run(2)
    checkpoint = cluster.kube.objects[RTJ.plural, *KEY]["spec"]["checkpoint"]
    cluster.edit_job(checkpoint={**checkpoint, "runId": "another"})
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.PASSED, DrillReason.MATCHED), status.message
    assert [e.seq for e in verified(cluster)] == [status.journal_entry], "in the run that was drilled"
    assert cluster.sandbox() is None


def test_what_cannot_be_drilled_ends_with_the_reason(cluster: DrillCluster) -> None:
    cluster.put_drill(nodes=3)
    cluster.put_drill("gone", checkpoint="000000000009-0000000001-00000000")
    cluster.put_drill("other", jobName="nobody")
    cluster.run(8)
    status = cluster.drill().status
    assert status.reason == DrillReason.SPEC_INVALID
    assert "3 nodes x 1 ranks = 3 ranks gives dp 3" in (status.message or "")
    gone = cluster.drill("gone").status
    assert gone.reason == DrillReason.NOTHING_TO_DRILL
    assert "was never committed in this run" in (gone.message or "")
    assert cluster.drill("other").status.phase is None, "it is another job's"


def test_a_right_that_is_missing_is_in_the_status_until_it_is_granted(cluster: DrillCluster) -> None:
    cluster.put_drill()
    cluster.kube.denied["create", RTJ.plural] = RTJ.group
    cluster.run(3)
    status = cluster.drill().status
    assert status.reason == Reason.RIGHT_MISSING
    assert "grant create on resumabletrainingjobs.resumabletraining.io" in (status.message or "")
    cluster.kube.denied.clear()
    cluster.run(6)
    cluster.verdict(True)
    cluster.run(4)
    assert cluster.drill().status.phase is DrillPhase.PASSED


@pytest.mark.parametrize(
    ("error", "reason", "said"),
    [
        (
            WebhookFailed("500", status=500, sentence='failed calling webhook "vpod.example.com": refused'),
            "WebhookFailing",
            "admission webhook vpod.example.com does not answer",
        ),
        (
            OverflowError("too large"),
            "OperatorFailing",
            "fails on this drill: OverflowError: too large. This is",
        ),
    ],
)
def test_what_is_in_a_drills_way_is_in_its_status_until_it_passes(
    cluster: DrillCluster, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, said: str
) -> None:
    create = cluster.kube.create

    async def failing(kind: Kind, *given: Any, **more: Any) -> Object:
        if kind is not EVENTS:
            raise error
        return await create(kind, *given, **more)

    cluster.put_drill()
    with monkeypatch.context() as broken:
        broken.setattr(cluster.kube, "create", failing)
        for _ in range(6):
            with contextlib.suppress(TryLater, OverflowError):
                cluster.look()
        status = cluster.drill().status
        assert status.reason == reason
        assert said in (status.message or "")
    cluster.run(6)
    cluster.verdict(True)
    cluster.run(4)
    assert cluster.drill().status.phase is DrillPhase.PASSED


def test_an_object_of_somebody_else_under_the_sandbox_s_name_is_never_touched(cluster: DrillCluster) -> None:
    foreign: Object = {"metadata": {"name": "probe-drill", "namespace": "ns"}, "spec": {}}
    cluster.kube.put(RTJ, foreign)
    cluster.put_drill()
    for _ in range(4):
        cluster.look()
    assert cluster.drill().status.reason == DrillReason.NAME_TAKEN
    assert cluster.sandbox() == foreign


def test_a_drill_that_is_made_anew_waits_for_the_sandbox_of_the_former_one(cluster: DrillCluster) -> None:
    cluster.put_drill()
    leaving: Object = {"metadata": {"name": "probe-drill", "namespace": "ns", "deletionTimestamp": "now"}}
    cluster.kube.put(RTJ, {**leaving, "spec": {}})
    for _ in range(4):
        cluster.look()
    assert cluster.drill().status.phase is DrillPhase.RUNNING
    assert "the former probe-drill is gone" in (cluster.drill().status.message or "")
    del cluster.kube.objects[RTJ.plural, *SANDBOX]
    cluster.look()
    sandbox = cluster.sandbox()
    assert sandbox is not None
    assert sandbox["metadata"]["ownerReferences"][0]["uid"] == "uid-probe"


def test_the_cheap_level_reads_bytes_in_one_pod_and_records_them(cluster: DrillCluster) -> None:
    cluster.put_drill(deep=False)
    for _ in range(3):
        cluster.look()
    job = cluster.kube.objects[JOBS.plural, *SANDBOX]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    env = {e["name"]: e.get("value") for e in container["env"]}
    newest = cluster.commits[1].checkpoint_id
    assert (env["RTJ_CHECKPOINT"], env["RTJ_RUN_ID"]) == (newest, "sft"), "bytes need no witness"
    cluster.reader_says(ReadResult(checkpoint_id=newest, bytes=32, seconds=1.5).to_json())
    for _ in range(3):
        cluster.look()
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.PASSED, DrillReason.BYTES_PROVEN)
    assert status.bytes == 32
    (entry,) = verified(cluster)
    assert (entry.level, entry.detail["bytes"], entry.topology_to) == ("bytes", 32, None)
    assert (JOBS.plural, *SANDBOX) not in cluster.kube.objects


def test_what_a_reader_finds_wrong_is_read_again_before_it_counts(cluster: DrillCluster) -> None:
    newest = cluster.commits[1]
    fault = RestoreFault(
        checkpoint_id=newest.checkpoint_id,
        fault="bytes",
        reason="x",
        file="rank-00000.distcp",
        expected="the bytes of leaves 0 to 0",
        found="other bytes in leaf 0",
    )
    said = ReadResult(checkpoint_id=newest.checkpoint_id, fault=fault).to_json()
    for name, damaged in (("lies", False), ("probe", True)):
        cluster.put_drill(name, deep=False)
        for _ in range(3):
            cluster.look()
        if damaged:
            cluster.shard(newest).chmod(0o644)
            cluster.shard(newest).write_bytes(b"x" * 16)
        else:
            cluster.kube.objects[JOBS.plural, *SANDBOX] = cluster.kube.objects[
                JOBS.plural, "ns", "lies-drill"
            ]
        cluster.reader_says(said)
        for _ in range(3):
            cluster.look()
        status = cluster.drill(name).status
        reason = DrillReason.CHECKPOINT_BAD if damaged else DrillReason.NOT_CONFIRMED
        assert (status.phase, status.reason) == (DrillPhase.FAILED, reason), status.message
        assert status.quarantined == damaged
        assert (newest.checkpoint_id in cluster.history_of().quarantined) == damaged
        cluster.kube.objects.pop((JOBS.plural, *SANDBOX), None)
        del cluster.kube.objects[DRILLS.plural, "ns", name]

"""From a drill's result to its end: what is in the way of the journal, deadlines, retention, operators that die."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drill_world import NOW, RUN, SANDBOX, DrillCluster
from fake_cluster import Died

from rtj_operator.api.drill import DrillPhase
from rtj_operator.drills.words import DrillReason
from rtj_operator.kube import JOBS, RTJ
from trainer_sidecar.contract.drill import ReadResult
from trainer_sidecar.contract.journal import Manifest, Owner, Verified
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Order
from trainer_sidecar.contract.restore_fault import RestoreFault
from trainer_sidecar.store.base import UnavailableError
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.retention import RetentionPolicy, retire

Change = Callable[[DrillCluster, bool], None]


@pytest.fixture
def cluster(tmp_path: Path) -> DrillCluster:
    return DrillCluster(tmp_path / "store")


def store_away(cluster: DrillCluster, away: bool) -> None:
    def refuse(spec: Any, credentials: Any) -> Any:
        raise UnavailableError("no answer")

    if away:
        cluster.stores.get = refuse  # type: ignore[method-assign]
    else:
        del cluster.stores.get


def schema_unknown(cluster: DrillCluster, away: bool) -> None:
    cluster.edit_job(batch={"globalBatchSize": "many" if away else 8})


@pytest.mark.parametrize(
    ("trouble", "said"),
    [(store_away, "UnavailableError: no answer"), (schema_unknown, "globalBatchSize")],
)
def test_a_result_that_cannot_be_recorded_waits_without_nodes_and_says_why(
    cluster: DrillCluster, trouble: Change, said: str
) -> None:
    cluster.put_drill()
    cluster.run(6)
    cluster.verdict(True)
    cluster.run(2)
    matched = cluster.drill().status.message or ""
    trouble(cluster, True)
    cluster.run(2)
    assert cluster.sandbox_plan().order is Order.SAVE_AND_EXIT
    cluster.ranks_end(OutcomeKind.STOPPED)
    cluster.run(4)
    status, sandbox = cluster.drill().status, cluster.sandbox()
    assert (status.phase, status.reason) == (DrillPhase.RECORDING, DrillReason.MATCHED)
    assert (status.message or "").startswith(f"{matched}. It is not done yet: ")
    assert said in (status.message or "")
    assert sandbox is not None
    assert not [key for key in cluster.kube.objects if key[0] == JOBS.plural], "no pod of it is left"
    assert list(cluster.history_of().holds) == [cluster.commits[0].checkpoint_id], "and its hold is"
    trouble(cluster, False)
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.message) == (DrillPhase.PASSED, matched)
    assert status.journal_entry is not None
    assert cluster.sandbox() is None


def test_a_result_that_is_there_counts_when_the_operator_was_away_past_the_deadline(
    cluster: DrillCluster,
) -> None:
    cluster.put_drill(deadlineSeconds=60)
    cluster.run(6)
    cluster.verdict(True)
    cluster._sandboxes()
    cluster.now = NOW + 3600
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.PASSED, DrillReason.MATCHED), status.message
    assert status.journal_entry is not None


def test_no_sandbox_is_made_past_the_deadline(cluster: DrillCluster) -> None:
    cluster.put_drill(deadlineSeconds=60)
    cluster.look()
    assert cluster.drill().status.checkpoint is not None
    cluster.now = NOW + 61
    cluster.run(4)
    assert cluster.drill().status.reason == DrillReason.DEADLINE_EXCEEDED
    assert ("create", RTJ.plural, SANDBOX[1]) not in cluster.kube.log


def test_a_sandbox_that_cannot_be_read_ends_at_the_deadline(cluster: DrillCluster) -> None:
    cluster.put_drill(deadlineSeconds=60)
    cluster.run(6)
    sandbox = cluster.kube.objects[RTJ.plural, *SANDBOX]
    sandbox["spec"]["nodes"] = "many"
    cluster.run(2)
    assert "nodes" in (cluster.drill().status.message or ""), "what is wrong with it is said meanwhile"
    cluster.now = NOW + 61
    cluster.run(4)
    assert cluster.drill().status.reason == DrillReason.DEADLINE_EXCEEDED
    assert cluster.sandbox() is None


def damaged(commit: Manifest) -> ReadResult:
    fault = RestoreFault(
        checkpoint_id=commit.checkpoint_id,
        fault="missing",
        reason="x",
        file="rank-00000.distcp",
        expected="an object",
        found="nothing",
    )
    return ReadResult(checkpoint_id=commit.checkpoint_id, fault=fault)


@pytest.mark.parametrize("good", [True, False])
def test_a_checkpoint_that_retention_takes_from_under_a_reader_is_accused_of_nothing(
    tmp_path: Path, good: bool
) -> None:
    cluster = DrillCluster(tmp_path / "store", 1, 2, 3)
    first = cluster.commits[0]
    cluster.put_drill(deep=False, checkpoint=first.checkpoint_id)
    for _ in range(3):
        cluster.look()
    journal = Journal(cluster.stores.store, RUN)
    owner, policy = Owner(namespace="ns", name="sft", uid="uid-job"), RetentionPolicy(keep_last=2)
    epoch = journal.read().epoch
    assert retire(journal, policy, epoch=epoch, owner=owner, writer="test") == [first.checkpoint_id]
    cluster.reader_says((ReadResult(checkpoint_id=first.checkpoint_id) if good else damaged(first)).to_json())
    for _ in range(5):
        cluster.look()
    status = cluster.drill().status
    assert f"checkpoint {first.checkpoint_id} is retired" in (status.message or "")
    ends = {
        True: (DrillPhase.PASSED, DrillReason.BYTES_PROVEN),
        False: (DrillPhase.FAILED, DrillReason.NOTHING_TO_DRILL),
    }
    assert (status.phase, status.reason) == ends[good]
    assert not cluster.history_of().quarantined


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("fatal", range(1, 6))
def test_an_operator_that_dies_after_any_write_loses_nothing_that_a_reader_has_found(
    tmp_path: Path, fatal: int, good: bool
) -> None:
    cluster = DrillCluster(tmp_path / "store")
    newest = cluster.commits[1]
    cluster.put_drill(deep=False)
    for _ in range(3):
        cluster.look()
    if not good:
        cluster.shard(newest).unlink()
    cluster.reader_says(
        (ReadResult(checkpoint_id=newest.checkpoint_id) if good else damaged(newest)).to_json()
    )
    cluster.fatal = fatal
    for _ in range(8):
        try:
            cluster.look()
        except Died:
            cluster.reconciler = cluster.drill_operator()
    assert cluster.fatal <= 0, "the fault has fired"
    status, history = cluster.drill().status, cluster.history_of()
    if good:
        assert (status.phase, status.reason) == (DrillPhase.PASSED, DrillReason.BYTES_PROVEN)
        assert [e.seq for e in history.entries if isinstance(e, Verified)] == [status.journal_entry]
    else:
        assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.CHECKPOINT_BAD)
        assert history.quarantined[newest.checkpoint_id].seq == status.journal_entry
    assert (JOBS.plural, *SANDBOX) not in cluster.kube.objects

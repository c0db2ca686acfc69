"""A save that all ranks have sealed counts, even when every rank is dead and the store away before its commit."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from hack.cluster_world import START_SECONDS, Job, World
from hack.demo.faults import rank_pids
from trainer_sidecar.contract.journal import Attempt, Manifest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
OUTAGE_SECONDS = float(os.environ.get("RTJ_STORE_OUTAGE_SECONDS", "0"))
"""How long the store stays away once the ranks are dead, at least; `make soak-cluster` takes 300."""


def sealed_step(job: Job) -> int | None:
    """Step of a save that all ranks have sealed and that is not committed."""
    status = job.sidecar()
    save = status.in_flight if status else None
    return save.step if save and save.sealed == save.of else None


def test_a_sealed_save_is_committed_after_all_ranks_were_killed_and_is_the_next_restore_point(
    world: World,
) -> None:
    document = world.document("sealed", ranks=2, interval=20, steps=3000, env={"TEST_PACE": "/ledger/pace"})
    job = world.job(document)
    job.pace(0.05)
    job.wait_commit(beyond=0)
    try:
        world.cluster.tool("s3", "stop")
        step = job.wait("save that is sealed while the store is away", START_SECONDS, sealed_step)
        ranks = rank_pids(job.pods[0]["metadata"]["uid"])
        assert sorted(ranks) == [0, 1]
        for pid in ranks.values():
            os.kill(pid, signal.SIGKILL)
        killed = time.time()
        job.wait("trace of the deaths", 60, ranks_are_dead)
        assert sealed_step(job) == step, "the kill came before the commit"
        told = job.wait("word of the store", 120, word_of_the_store)
        assert "cannot be reached" in told["message"]
        while time.time() < killed + OUTAGE_SECONDS:
            assert job.status["phase"] not in ("Failed", "Complete"), job.status
            assert len(job.pods) == 1, "the pod with the sealed save is kept"
            time.sleep(1)
    finally:
        world.cluster.tool("s3", "start")
    job.wait_training(attempt=2)
    entries = job.entries()
    saved = next(e for e in entries if isinstance(e, Manifest) and e.step == step)
    second = [e for e in entries if isinstance(e, Attempt)][1]
    assert saved.time > killed, "it was committed after its ranks had died"
    assert saved.epoch != second.seq
    assert saved.seq < second.seq
    assert second.restore is not None
    assert second.restore.sequence == saved.seq
    assert job.status["restorePoint"]["step"] == step
    job.delete()


def word_of_the_store(job: Job) -> dict[str, Any] | None:
    """The condition that tells a user why nothing goes on."""
    degraded = job.condition("Degraded")
    return degraded if degraded.get("status") == "True" and "Store" in degraded["reason"] else None


def ranks_are_dead(job: Job) -> bool:
    status = job.sidecar()
    return status is not None and not status.ready and not any(rank.alive for rank in status.ranks)

"""The operator against a real API server, real kubelets, real sidecars and a real S3 server."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from operator_world import STANDIN, Place, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def rank_pids() -> list[int]:
    """Ranks of all pods on this machine: the nodes are network namespaces of it."""
    found = subprocess.run(
        ["pgrep", "-f", "python3 -u /standin/rank.py"], capture_output=True, text=True, check=False
    )
    return [
        int(pid) for pid in found.stdout.split() if b"--rank" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def ranks_of(place: Place) -> list[int]:
    """Ranks whose cgroup is that of one of this place's pods."""
    uids = [p["metadata"]["uid"] for p in place.pods()]
    return [pid for pid in rank_pids() if any(uid in Path(f"/proc/{pid}/cgroup").read_text() for uid in uids)]


def test_life_of_a_job_from_first_placement_through_kill_scale_and_suspend_to_complete(place: Place) -> None:
    assert STANDIN.is_dir()
    place.start()
    place.apply("main", env={"STEPS": "100000"})
    place.wait_phase("main", "Running")
    place.wait_commit("main")
    before = sorted(p["metadata"]["uid"] for p in place.pods())

    os.kill(ranks_of(place)[-1], signal.SIGKILL)
    eventually(lambda: (place.status("main").get("attempt") or {}).get("number") == 2, "attempt 2", 30)
    status = place.wait_phase("main", "Running")
    assert sorted(p["metadata"]["uid"] for p in place.pods()) == before, "relaunched in the same pods"
    assert status["attempts"][0]["outcome"] == "Failed"
    assert "SIGKILL" in status["attempts"][0]["message"]
    assert status["attempts"][1]["fromStep"] > 0
    print("seconds after the kill:", status["attempts"][1]["seconds"])

    committed = place.wait_commit("main", status["lastCommitted"]["step"])
    place.kubectl("-n", place.namespace, "scale", "rtj", "main", "--replicas=1")
    eventually(lambda: (place.status("main").get("plan") or {}).get("nodes") == 1, "a plan on one node", 120)
    status = place.status("main")
    assert status["restorePoint"]["step"] > committed, "saved before it became smaller"
    assert [a["cause"] for a in place.attempts("main")] == ["First", "RankFailed", "Resized"]

    place.wait_phase("main", "Running")
    suspend = '{"spec":{"suspend":true}}'
    place.kubectl("-n", place.namespace, "patch", "rtj", "main", "--type=merge", "-p", suspend)
    status = place.wait_phase("main", "Suspended")
    assert place.get("pods")["items"] == []
    assert status["nodes"] == 0

    last = status["lastCommitted"]["step"] + 30
    template = place.job("main", env={"STEPS": str(last)})["spec"]["template"]
    place.apply("main", nodes=1, suspend=False, template=template)
    status = place.wait_phase("main", "Complete")
    assert status["counters"]["failures"] == 1
    commits = [e["step"] for e in place.journal("main") if e["kind"] == "Manifest"]
    assert commits[-1] == last, "the last save is committed"


@pytest.mark.parametrize(
    "fault", ["after-status-write:1", "after-job-create", "after-attempt-entry", "after-plan-publish-one-pod"]
)
def test_an_operator_killed_after_a_write_leaves_nothing_twice(place: Place, fault: str) -> None:
    place.start(fault)
    place.apply("crash")
    place.wait_killed()
    place.start()
    place.wait_phase("crash", "Running")
    assert len(place.get("jobs")["items"]) == 1
    attempts = place.attempts("crash")
    said = f"{place.status('crash')['attempts']}\n{place.log()[-3000:]}"
    assert [a["attempt"] for a in attempts] == [1], said
    assert place.status("crash")["attempt"]["nonce"] == attempts[0]["nonce"]


def test_a_pod_deleted_by_hand_saves_and_the_job_goes_on_until_it_is_deleted_with_its_checkpoints(
    place: Place,
) -> None:
    place.start()
    place.apply("hand", deletionPolicy="Delete")
    place.wait_phase("hand", "Running")
    committed = place.wait_commit("hand")
    victim = place.pods()[0]["metadata"]["name"]
    place.kubectl("-n", place.namespace, "delete", "pod", victim, "--wait=false")
    eventually(lambda: (place.status("hand").get("placement") or {}).get("number") == 2, "placement 2", 60)
    status = place.wait_phase("hand", "Running")
    assert status["restorePoint"]["step"] >= committed
    assert status["attempts"][1]["cause"] == "PodLost", status["attempts"]

    assert any("/checkpoints/" in key for key in place.objects("hand"))
    place.kubectl("-n", place.namespace, "delete", "rtj", "hand", "--wait=true", "--timeout=50s")
    assert place.pods() == []
    assert [k for k in place.objects("hand") if "/journal/" not in k] == []
    assert place.journal("hand")[-1]["reason"] == "deleted with its object"


def test_a_spec_that_cannot_run_is_refused_with_a_sentence_and_creates_nothing(place: Place) -> None:
    place.start()
    place.apply("bad", batch={"globalBatchSize": 7})
    status = place.wait_phase("bad", "Invalid", 60)
    valid = next(c for c in status["conditions"] if c["type"] == "Valid")
    assert valid["status"] == "False"
    assert "7" in valid["message"]
    assert place.get("jobs")["items"] == []

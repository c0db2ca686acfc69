"""The operator's own trouble, and the cluster's: stopped operators, no API server, hangs, preemption, fewer GPUs.

Ranks are stand-ins; everything else is real. Trainers never pay for what goes wrong on this side.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import RESOURCE, ROOT, Place, eventually, tool

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
OUTAGE_SECONDS = float(os.environ.get("RTJ_API_OUTAGE_SECONDS", "20"))
"""`make soak-cluster` takes 300."""
SCRIPT = b"/standin/rank.py"


def ranks_of(place: Place) -> dict[int, int]:
    """Pid on this machine of each rank of the place's pods: the nodes are network namespaces of it."""
    uids = [p["metadata"]["uid"] for p in place.pods()]
    found = {}
    for folder in (f for f in Path("/proc").iterdir() if f.name.isdigit()):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if (
                words[-3:-1] != [b"-u", SCRIPT]
                or b"--rank" in words
                or not any(u in (folder / "cgroup").read_text() for u in uids)
            ):
                continue
            variables = dict(
                v.split(b"=", 1) for v in (folder / "environ").read_bytes().split(b"\0") if b"=" in v
            )
        except OSError:
            continue  # it has ended
        if b"RANK" in variables:
            found[int(variables[b"RANK"])] = int(folder.name)
    return found


def both_ranks(place: Place, but: dict[int, int] | None = None) -> dict[int, int]:
    """The two ranks, once both run and are others than `but`."""

    def seen() -> dict[int, int] | None:
        ranks = ranks_of(place)
        return ranks if set(ranks) == {0, 1} and not set(ranks.values()) & set((but or {}).values()) else None

    found: dict[int, int] = eventually(seen, "two ranks run")
    return found


def commits(place: Place, name: str) -> list[int]:
    """Steps that the run's journal has as committed."""
    return [e["step"] for e in place.journal(name) if e["kind"] == "Manifest"]


def operator_pid(place: Place) -> int:
    """The operator itself, behind the tool that entered the network namespace."""
    assert place.process is not None
    pids = [place.process.pid]
    for pid in pids:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pids += [int(child) for child in children]
    return next(p for p in reversed(pids) if b"rtj_operator.main" in Path(f"/proc/{p}/cmdline").read_bytes())


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"


def test_an_operator_stopped_across_a_fence_and_continued_after_another_took_over_does_nothing_twice(
    place: Place, tmp_path: Path
) -> None:
    place.start("after-attempt-entry:2:stop")
    place.apply("twice")
    place.wait_phase("twice", "Running")
    place.wait_commit("twice")
    first = both_ranks(place)
    os.kill(first[1], signal.SIGKILL)
    stopped = operator_pid(place)
    eventually(lambda: is_stopped(stopped), "the operator stands still between journal and plan", 60)
    assert [a["attempt"] for a in place.attempts("twice")] == [1, 2]

    (tmp_path / "second").mkdir()
    second = Place(tmp_path / "second", place.env, namespace=place.namespace)
    second.start()
    try:
        ranks = both_ranks(place, but=first)
        place.wait_commit("twice", place.wait_phase("twice", "Running")["restorePoint"]["step"])
        assert [a["attempt"] for a in place.attempts("twice")] == [1, 2], (
            "the second one used what stood there"
        )
        os.kill(ranks[1], signal.SIGKILL)
        third = both_ranks(place, but=ranks)
        eventually(lambda: (place.status("twice").get("attempt") or {}).get("number") == 3, "attempt 3")
        committed = place.wait_commit("twice", place.wait_phase("twice", "Running")["restorePoint"]["step"])

        os.kill(stopped, signal.SIGCONT)  # it goes on where it was: with the plan of attempt 2 in its hands
        place.wait_commit("twice", committed + 20)
        assert [a["attempt"] for a in place.attempts("twice")] == [1, 2, 3], place.log()[-3000:]
        assert ranks_of(place) == third, "trainers were not disturbed"
        assert len(place.get("jobs")["items"]) == 1
        status = place.wait_phase("twice", "Running")
        assert (status["attempt"]["number"], status["counters"]["failures"]) == (3, 2)
    finally:
        second.stop()


def test_without_an_api_server_ranks_train_and_commit_and_the_operator_goes_on_when_it_is_back(
    place: Place,
) -> None:
    place.start()
    place.apply("outage")
    place.wait_phase("outage", "Running")
    place.wait_commit("outage")
    ranks = both_ranks(place)
    tool("apiserver", "stop")
    try:
        deadline = time.monotonic() + OUTAGE_SECONDS

        before = commits(place, "outage")[-1]
        eventually(lambda: commits(place, "outage")[-1] > before + 20, "commits go on", 60)
        eventually(lambda: time.monotonic() > deadline, "the outage is long enough", OUTAGE_SECONDS + 5)
        assert place.process is not None
        assert place.process.poll() is None, place.log()[-3000:]
        during = commits(place, "outage")[-1]
    finally:
        tool("apiserver", "start")
    place.wait_commit("outage", during)
    eventually(lambda: place.status("outage")["phase"] == "Running", "it trains as before", 60)
    assert both_ranks(place) == ranks, "trainers were not disturbed"
    assert [a["attempt"] for a in place.attempts("outage")] == [1]

    os.kill(ranks[1], signal.SIGKILL)
    both_ranks(place, but=ranks)
    eventually(lambda: (place.status("outage").get("attempt") or {}).get("number") == 2, "attempt 2")


def test_ranks_that_make_no_step_leave_their_stacks_in_the_log_and_the_attempt_ends_as_hung(
    place: Place,
) -> None:
    place.start()
    place.apply("hangs", env={"HANG_AT": "50"}, restart={"hangTimeoutSeconds": 10})
    eventually(lambda: (place.status("hangs").get("attempt") or {}).get("number") == 2, "attempt 2", 180)
    status = place.wait_phase("hangs", "Running")
    record = status["attempts"][0]
    assert (record["outcome"], status["attempts"][1]["cause"]) == ("Hung", "Hung")
    assert "no step after 4" in record["message"] or "no step after 5" in record["message"], record
    for pod in place.pods():
        log = place.kubectl("-n", place.namespace, "logs", pod["metadata"]["name"], "-c", "trainer")
        assert "most recent call first" in log, log[-2000:]
        assert "in hang" in log
    assert status["counters"]["failures"] == 1


def preemptor(place: Place) -> dict[str, Any]:
    """A pod that nobody but the scheduler can make room for."""
    container = {
        "name": "urgent",
        "image": "localhost/rtj-base:dev",
        "imagePullPolicy": "Never",
        "command": ["sleep", "3600"],
        "resources": {"limits": {RESOURCE: 1}},
    }
    spec = {
        "priorityClassName": place.namespace,
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
    }
    meta = {"name": "urgent", "namespace": place.namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def test_a_job_that_the_scheduler_preempts_saves_yields_and_comes_back(place: Place) -> None:
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    priority["metadata"] = {"name": place.namespace}
    place.kubectl("apply", "-f", "-", stdin=json.dumps(priority))
    try:
        place.start()
        place.apply("yields")
        place.wait_phase("yields", "Running")
        committed = place.wait_commit("yields")
        place.kubectl("apply", "-f", "-", stdin=json.dumps(preemptor(place)))

        def smaller() -> bool:
            status = place.status("yields")
            return (status.get("plan") or {}).get("nodes") == 1 and status["phase"] == "Running"

        eventually(smaller, "it trains on the node that is left", 180)
        status = place.status("yields")
        assert status["restorePoint"]["step"] > committed, "it saved before it yielded"
        assert status["attempts"][1]["cause"] == "Preempted", json.dumps(status["attempts"])
        assert (status["counters"]["failures"], status["counters"]["preemptions"]) == (0, 1)
        urgent = place.get("pod", "urgent")
        assert urgent["status"]["phase"] == "Running"
        shown = " ".join(e.get("message", "") for e in place.get("events")["items"])
        assert "PreemptionByScheduler" in shown

        place.kubectl("-n", place.namespace, "delete", "pod", "urgent", "--wait=false")
        eventually(lambda: (place.status("yields").get("plan") or {}).get("nodes") == 2, "it comes back", 180)
        status = place.wait_phase("yields", "Running")
        assert status["counters"]["failures"] == 0
        assert [a["cause"] for a in place.attempts("yields")] == ["First", "Preempted", "Resized"]
    finally:
        place.kubectl("delete", "priorityclass", place.namespace)


def test_pods_that_are_older_than_the_stores_secret_are_replaced_before_ranks_train_in_vain(
    place: Place,
) -> None:
    place.kubectl("-n", place.namespace, "delete", "secret", "rtj-store")
    place.start(own_keys=False)
    place.apply("early")

    def refused() -> bool:
        conditions = place.status("early").get("conditions") or []
        return any((c["reason"], c["status"]) == ("StoreAccessDenied", "True") for c in conditions)

    eventually(refused, "the pods run and the store refuses the operator", 60)
    assert len(place.pods()) == 2
    place.make_secret()
    assert place.wait_commit("early") > 0
    status = place.status("early")
    assert status["placement"]["number"] == 2
    assert [a["attempt"] for a in place.attempts("early")] == [1], "none has trained in the pods before"
    assert status["counters"]["failures"] == 0
    reasons = [e.get("reason") for e in place.get("events")["items"]]
    assert "PodsWithoutKeys" in reasons


def slots(place: Place, node: str, count: int) -> None:
    patch = json.dumps({"status": {part: {RESOURCE: str(count)} for part in ("capacity", "allocatable")}})
    place.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)


def test_a_node_that_gains_or_loses_gpus_is_noticed_both_ways(place: Place) -> None:
    place.start()
    slots(place, "node2", 0)
    try:
        place.apply("gpus")
        eventually(
            lambda: (place.status("gpus").get("plan") or {}).get("nodes") == 1, "it starts smaller", 120
        )
        place.wait_commit("gpus")
        shown = next(c for c in place.status("gpus")["conditions"] if c["type"] == "Degraded")
        assert (shown["status"], shown["reason"]) == ("True", "FewerNodes")
        slots(place, "node2", 1)
        eventually(lambda: (place.status("gpus").get("plan") or {}).get("nodes") == 2, "it grows", 120)
        ranks, committed = (
            both_ranks(place),
            place.wait_commit("gpus", place.status("gpus")["restorePoint"]["step"]),
        )
        slots(place, "node2", 0)
        place.wait_commit("gpus", committed + 20)
        assert ranks_of(place) == ranks, "what runs goes on: the devices are given out"
        victim = next(p for p in place.pods() if p["spec"]["nodeName"] == "node2")["metadata"]["name"]
        place.kubectl("-n", place.namespace, "delete", "pod", victim, "--wait=false")
        eventually(lambda: (place.status("gpus").get("plan") or {}).get("nodes") == 1, "it shrinks", 120)
        assert place.status("gpus")["counters"]["failures"] == 0
    finally:
        slots(place, "node2", 1)


LOOK_FOR = """
import pathlib, sys
secret, found = sys.stdin.read().strip().encode(), []
for file in [*pathlib.Path('/proc').glob('[0-9]*/environ'), *pathlib.Path('/proc').glob('[0-9]*/cmdline'),
             *pathlib.Path('/run').rglob('*'), *pathlib.Path('/var/run/').rglob('*'), pathlib.Path('/proc/self/mounts'),
             *pathlib.Path(VOLUME).rglob('*')]:
    try:
        data = file.read_bytes() if not file.is_dir() else b''
    except OSError:
        continue
    if secret in data or b'serviceaccount' in str(file).encode():
        found.append(str(file))
print(len(list(pathlib.Path('/proc').glob('[0-9]*'))) > 0, found)
"""


@contextmanager
def tightened(place: Place) -> Iterator[None]:
    """The CRD of a later version that has forgotten O14: a rule on the spec that the stored object breaks."""
    file = ROOT / "crds" / "resumabletraining.io_resumabletrainingjobs.yaml"
    definition = yaml.safe_load(file.read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    rule = {
        "rule": "self.batch.globalBatchSize > 1000",
        "message": "batches below 1000 are not supported any more",
    }
    spec.setdefault("x-kubernetes-validations", []).append(rule)
    apply = ("apply", "--server-side", "--force-conflicts", "-f")
    place.kubectl(*apply, "-", stdin=json.dumps(definition))
    try:
        yield
    finally:
        place.kubectl(*apply, str(file))


def test_what_users_must_not_see_what_a_tightened_crd_must_not_stop_and_a_name_that_is_used_again(
    place: Place,
) -> None:
    place.start()
    place.apply("again")
    place.wait_phase("again", "Running")
    place.wait_commit("again")

    pod = place.pods()[0]
    trainer = next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")
    volume = next(m["mountPath"] for m in trainer["volumeMounts"] if m["name"] == "rtj-shared")
    code = LOOK_FOR.replace("VOLUME", repr(volume))
    name = pod["metadata"]["name"]
    look = ("-n", place.namespace, "exec", "-i", name, "-c", "trainer", "--", "python3", "-c", code)
    for key in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert place.kubectl(*look, stdin=place.env[key]).strip() == "True []", key

    ranks = both_ranks(place)
    with tightened(place):

        def said() -> bool:
            notes = [e.get("message") or e.get("note") or "" for e in place.get("events")["items"]]
            return any("install the CRD of this version" in note for note in notes)

        eventually(said, "an event says why the status stands still", 120)
        committed = commits(place, "again")[-1]
        eventually(lambda: commits(place, "again")[-1] > committed, "it trains on under the new rule")
    place.wait_commit("again", committed)
    assert ranks_of(place) == ranks

    place.kubectl("-n", place.namespace, "delete", "rtj", "again")
    place.apply("again")
    status = place.wait_phase("again", "Failed")
    assert status["reason"] == "RunExists"
    valid = next(c for c in status["conditions"] if c["type"] == "Valid")
    assert "checkpoint.adopt: true" in valid["message"]
    assert len(place.attempts("again")) == 1
    checkpoint = {**place.job("again")["spec"]["checkpoint"], "adopt": True}
    place.apply("again", checkpoint=checkpoint)
    status = place.wait_phase("again", "Running")
    assert status["restorePoint"]["step"] > 0, "the new object goes on with the old one's run"

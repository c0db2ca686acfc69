"""Reading objects and sidecars: odd fields, hostile answers, lost nodes, capacity."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_kube import FakeKube
from operator_values import plan, sidecar

from rtj_operator.api.names import LABEL_JOB, LABEL_PLACEMENT, LABEL_UID
from rtj_operator.capacity import Usage, node_rooms, pod_requests
from rtj_operator.decide.observed import Observed, PodView
from rtj_operator.kube import JOBS, NODES, PODS, RTJ, Forbidden, Kind, Object
from rtj_operator.observe import MAX_STATUS_BYTES, Graves, Observer, read_status
from rtj_operator.podview import job_view, pod_view, unix
from trainer_sidecar.contract.fault_order import FAULT_ANNOTATION
from trainer_sidecar.contract.plan import PLAN_ANNOTATION
from trainer_sidecar.contract.status import SidecarStatus

GPU = "nvidia.com/gpu"


def view(pod: Object) -> Any:
    return pod_view(pod, LABEL_PLACEMENT, sidecar="rtj-sidecar", trainer="trainer")


def pod_object(name: str = "p", **status: Any) -> Object:
    labels = {
        LABEL_PLACEMENT: "1",
        LABEL_JOB: "sft",
        LABEL_UID: "uid-job",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    meta = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": labels}
    return {"metadata": meta, "spec": {"nodeName": "node1"}, "status": status}


def test_a_pod_without_placement_or_index_is_none_of_ours() -> None:
    pod = pod_object()
    pod["metadata"]["labels"][LABEL_PLACEMENT] = "one"
    assert view(pod) is None


def test_the_end_of_the_trainer_is_its_container_status_with_the_launchers_outcome() -> None:
    message = '{"epoch":3,"attempt":1,"kind":"SavedAndStopped","step":9}'
    ended = {"terminated": {"exitCode": 143, "reason": "Error", "message": message}}
    found = view(pod_object(phase="Running", containerStatuses=[{"name": "trainer", "state": ended}]))
    assert found.trainer_end.exit_code == 143
    assert found.trainer_end.outcome.step == 9
    assert not found.up


def test_a_sidecar_runs_once_its_startup_probe_has_passed() -> None:
    """Before, it cannot answer: its silence would count as a lost node on a busy machine."""

    def running(**more: bool) -> bool:
        sidecar = {"name": "rtj-sidecar", "state": {"running": {}}, **more}
        return bool(view(pod_object(initContainerStatuses=[sidecar])).sidecar_running)

    assert not running(started=False)
    assert running(started=True)
    assert running()


async def look(observer: Observer, job: Object) -> Observed:
    return await observer.look(job, await observer.read(job), status_port=1, capacity_for=None)


@pytest.mark.parametrize("by", ["2026-01-01T00:00:30Z", "2126-01-01T00:00:00Z"])
def test_a_pod_that_stands_after_its_grace_period_is_overdue_by_no_others_clock(by: str) -> None:
    kube, times = FakeKube(), [1000.0]
    pod = pod_object()
    pod["metadata"] |= {"deletionTimestamp": by, "deletionGracePeriodSeconds": 120}
    kube.put(PODS, pod)
    job = {"metadata": {"name": "sft", "namespace": "ns", "uid": "uid-job"}}
    observer, found = Observer(kube, clock=lambda: times[-1]), []
    for passed in (0, 119, 140):
        times.append(times[0] + passed)
        found += [p.overdue_seconds for p in asyncio.run(look(observer, job)).pods]
    assert found == [0, 0, 20]


def test_a_termination_message_that_is_not_ours_is_only_text() -> None:
    ended = {"terminated": {"exitCode": 1, "message": "segfault {"}}
    found = view(pod_object(containerStatuses=[{"name": "trainer", "state": ended}]))
    assert found.trainer_end.outcome is None


def test_a_plan_annotation_that_is_garbage_is_no_plan() -> None:
    pod = pod_object()
    pod["metadata"]["annotations"] = {"resumabletraining.io/plan": "{"}
    assert view(pod).plan is None


def test_waiting_for_ones_turn_is_no_trouble_and_a_failed_pull_is() -> None:
    turn = [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}]
    pull = [{"name": "rtj-sidecar", "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}]
    assert view(pod_object(containerStatuses=turn)).waiting_reason == ""
    assert (
        view(pod_object(containerStatuses=turn, initContainerStatuses=pull)).waiting_reason == "ErrImagePull"
    )


def test_job_conditions_and_suspension_are_read() -> None:
    job = {
        "metadata": {"name": "sft-p1", "uid": "j", "labels": {LABEL_PLACEMENT: "1"}},
        "spec": {"parallelism": 2, "suspend": True},
        "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]},
    }
    found = job_view(job, LABEL_PLACEMENT)
    assert found is not None
    assert (found.suspended, found.failed) == (True, "BackoffLimitExceeded: ")
    assert unix("2026-01-01T00:00:00Z") == 1767225600


def test_graves_keep_the_newest_bodies_only() -> None:
    graves = Graves(limit=2)
    for name in ("a", "b", "c"):
        graves.bury(pod_object(name))
    assert [b["metadata"]["name"] for b in graves.of("uid-job")] == ["b", "c"]


ANSWERS: dict[str, bytes | str] = {
    "good": sidecar(0).to_bytes(),
    "other pod": sidecar(1).to_bytes(),
    "garbage": b"<html>",
    "no model": b'{"podIndex": 0}',
    "endless": b" " * (MAX_STATUS_BYTES + 10),
    "deep": b"[" * 100_000,
    "redirect": "redirect",
    "slow": "slow",
    "error": "error",
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_only_a_small_quick_answer_of_the_model_counts(kind: str) -> None:
    found = asyncio.run(ask(ANSWERS[kind]))
    assert (found is not None) == (kind == "good")


async def ask(answer: bytes | str) -> SidecarStatus | None:
    async def status(_: web.Request) -> web.Response:
        if answer == "redirect":
            raise web.HTTPFound("http://169.254.169.254/")
        if answer == "slow":
            await asyncio.sleep(5)
        return web.Response(
            body=answer if isinstance(answer, bytes) else b"", status=500 if answer == "error" else 200
        )

    app = web.Application()
    app.router.add_get("/status", status)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as session:
            return await read_status(session, "127.0.0.1", port, 0)
    finally:
        await runner.cleanup()


def node(name: str, *, gpus: str = "2", ready: str = "True", **spec: Any) -> Object:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    allocatable = {GPU: gpus, "cpu": "4", "memory": "8Gi", "pods": "110"}
    return {
        "metadata": {"name": name},
        "spec": spec,
        "status": {"allocatable": allocatable, "conditions": [condition]},
    }


def wanting(gpus: int = 1, **spec: Any) -> Object:
    return {"spec": {"containers": [{"resources": {"limits": {GPU: gpus, "cpu": "1"}}}], **spec}}


def test_room_counts_what_others_hold_and_what_the_sidecar_adds() -> None:
    other = {"spec": {"nodeName": "a", **wanting()["spec"]}}
    usage = Usage()
    usage.add(other)
    usage.add({"spec": {"nodeName": "b", **wanting()["spec"]}}, "own")
    found = {r.name: r.fits for r in node_rooms([node("a"), node("b")], usage.without("own"), wanting())}
    assert found == {"a": 1, "b": 2}
    native = {"restartPolicy": "Always", "resources": {"requests": {"cpu": "250m"}}}
    template = wanting(initContainers=[native, {"resources": {"limits": {"cpu": "64"}}}])
    assert str(pod_requests(template["spec"])["cpu"]) == "1.250"


def test_cordoned_tainted_and_unselected_nodes_have_no_room() -> None:
    taint = {"key": "gpu", "value": "only", "effect": "NoSchedule"}
    nodes = [node("a", unschedulable=True), node("b", taints=[taint]), node("c", ready="Unknown")]
    found = {r.name: (r.fits, r.ready) for r in node_rooms(nodes, {}, wanting())}
    assert found == {"a": (0, True), "b": (0, True), "c": (2, False)}
    tolerant = wanting(tolerations=[{"key": "gpu", "operator": "Exists"}])
    assert {r.name: r.fits for r in node_rooms(nodes, {}, tolerant)}["b"] == 2
    assert not any(r.fits for r in node_rooms(nodes, {}, wanting(nodeSelector={"zone": "x"})))


class NoNodes(FakeKube):
    """A service account with a Role only."""

    asked = 0

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        if kind is NODES:
            self.asked += 1
            raise Forbidden("nodes is forbidden", status=403)
        return await super().get(kind, namespace, name)


def observe(kube: FakeKube, job: Object) -> Any:
    async def once() -> Any:
        observer = Observer(kube)
        try:
            await look(observer, job)
            return await look(observer, job)
        finally:
            await observer.close()

    return asyncio.run(once())


def rtj() -> Object:
    return {
        "metadata": {"name": "sft", "namespace": "ns", "uid": "uid-job"},
        "status": {"placement": {"number": 1}},
    }


def test_a_pod_on_a_node_that_is_not_ready_or_gone_is_on_a_lost_node() -> None:
    kube = FakeKube()
    kube.put(PODS, pod_object("a"))
    assert observe(kube, rtj()).pods[0].node_lost, "the node does not exist"
    kube.put(NODES, node("node1", ready="Unknown"))
    assert observe(kube, rtj()).pods[0].node_lost
    kube.put(NODES, node("node1"))
    assert not observe(kube, rtj()).pods[0].node_lost


def test_a_pod_that_answers_lives_whatever_its_node_could_not_report() -> None:
    """After an outage of the API server all nodes look lost for some seconds."""
    views = (PodView("p-0", "u0", 0, 1, node="n1"), PodView("p-1", "u1", 1, 1, node="n1", status=sidecar(1)))
    kube = FakeKube()
    kube.put(NODES, node("n1", ready="Unknown"))
    seen = asyncio.run(Observer(kube)._with_lost_nodes(list(views)))
    assert [v.node_lost for v in seen] == [True, False]


def test_a_pod_that_a_list_lacks_before_the_watch_has_told_of_its_end_is_gone_with_its_last_words() -> None:
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    leaving = pod_object("a", phase="Running", conditions=[disrupted])
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
    kube = FakeKube()
    kube.put(NODES, node("node1"))
    kube.put(PODS, leaving)
    observer = Observer(kube)
    (seen,) = asyncio.run(look(observer, rtj())).pods
    assert (seen.deleting, seen.gone) == (True, False)
    asyncio.run(kube.delete(PODS, "ns", "a", uid="uid-a"))
    (seen,) = asyncio.run(look(observer, rtj())).pods
    assert (seen.gone, seen.disruption) == (True, "PreemptionByScheduler")


def test_a_cordoned_node_is_seen_so_that_a_drain_can_be_called_one() -> None:
    kube = FakeKube()
    kube.put(PODS, pod_object("a"))
    kube.put(NODES, node("node1", unschedulable=True))
    (seen,) = observe(kube, rtj()).pods
    assert (seen.node_cordoned, seen.node_lost) == (True, False)


def test_sidecars_are_asked_at_the_port_that_their_plan_names_not_the_edited_specs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    async def ask(session: Any, ip: str, port: int, index: int) -> None:
        asked.append(port)

    monkeypatch.setattr("rtj_operator.observe.read_status", ask)
    kube = FakeKube()
    kube.put(NODES, node("node1"))
    running = {"name": "rtj-sidecar", "state": {"running": {}}}
    pod = pod_object("a", podIP="10.0.0.1", initContainerStatuses=[running])
    kube.put(PODS, pod)
    observe(kube, rtj())
    assert set(asked) == {1}, "without a plan: the spec's"
    asked.clear()
    pod["metadata"]["annotations"] = {PLAN_ANNOTATION: plan().to_json()}
    observe(kube, rtj())
    assert set(asked) == {9477}


@pytest.mark.parametrize(("annotations", "asked"), [({}, {0}), ({FAULT_ANNOTATION: "{}"}, set(range(9)))])
def test_every_sidecar_is_asked_where_a_drill_has_orders_since_each_may_tell_of_a_fault(
    monkeypatch: pytest.MonkeyPatch, annotations: dict[str, str], asked: set[int]
) -> None:
    found: set[int] = set()

    async def ask(session: Any, ip: str, port: int, index: int) -> SidecarStatus:
        found.add(index)
        return sidecar(index)

    monkeypatch.setattr("rtj_operator.observe.read_status", ask)
    kube = FakeKube()
    kube.put(NODES, node("node1"))
    running = {"name": "rtj-sidecar", "state": {"running": {}}}
    ready = [{"type": "Ready", "status": "True"}]
    for index in range(9):
        pod = pod_object(f"p{index}", podIP="10.0.0.1", initContainerStatuses=[running], conditions=ready)
        pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = str(index)
        kube.put(PODS, pod)
    job = rtj()
    job["metadata"]["annotations"] = annotations
    observe(kube, job)
    assert found == asked


def test_without_rights_on_nodes_nothing_is_called_lost_and_the_right_is_not_asked_for_each_time() -> None:
    kube = NoNodes()
    kube.put(PODS, pod_object("a"))
    assert not observe(kube, rtj()).pods[0].node_lost
    assert kube.asked == 1


def test_paths_are_quoted_and_scoped() -> None:
    assert RTJ.path("ns", "a", "status") == (
        "/apis/resumabletraining.io/v1alpha1/namespaces/ns/resumabletrainingjobs/a/status"
    )
    assert PODS.path(None) == "/api/v1/pods"
    assert NODES.path(None, "n/../x") == "/api/v1/nodes/n%2F..%2Fx"
    assert JOBS.api_version == "batch/v1"


@pytest.mark.parametrize(
    ("terms", "fitting"),
    [
        ([{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}], {"b"}),
        ([{"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["h100"]}]}], {"a", "c"}),
        ([{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}], {"a", "b"}),
        ([{"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}], {"c"}),
        ([{"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["80"]}]}], {"b"}),
        ([{"matchExpressions": [{"key": "memory", "operator": "Lt", "values": ["80"]}]}], {"a"}),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["c"]}]}], {"c"}),
        ([{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}, {}], {"a", "b"}),
        ([{}], set()),
    ],
)
def test_room_is_on_nodes_that_a_required_affinity_takes(terms: list[Any], fitting: set[str]) -> None:
    """As the scheduler has it: one of the terms, and all of its expressions. An empty term takes no node."""
    nodes = [node(name) for name in "abc"]
    for made, labels in zip(
        nodes, ({"gpu": "a100", "memory": "40"}, {"gpu": "h100", "memory": "141"}, {}), strict=True
    ):
        made["metadata"]["labels"] = labels
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    template = wanting(affinity={"nodeAffinity": required})
    assert {r.name for r in node_rooms(nodes, {}, template) if r.fits} == fitting

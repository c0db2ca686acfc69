"""D10: the ways in which a pod, its processes or its node go. The job goes on from the newest commit, and says why."""

import subprocess
import time
from collections.abc import Callable
from functools import partial

from trainer_sidecar.contract.journal import Attempt
from trainer_sidecar.faultdrills.outcome import Check, Seen
from trainer_sidecar.faultdrills.stage import DrillError, NotRunError, Stage
from trainer_sidecar.kube_commands.cluster import ClusterError, JsonObject

_COMMAND_SECONDS = 120
Act = Callable[[Stage, JsonObject], str]


def pod_deleted(stage: Stage) -> Seen:
    """A pod goes without grace."""

    def act(stage: Stage, pod: JsonObject) -> str:
        stage.delete_pod(pod)
        return f"pod {pod['metadata']['name']} deleted with grace period 0"

    stage.start()
    return _ended(stage, act, ("PodLost",))


def pod_evicted(stage: Stage) -> Seen:
    """The node is cordoned and the pod evicted, as `kubectl drain` does it."""

    def act(stage: Stage, pod: JsonObject) -> str:
        meta, node = pod["metadata"], pod["spec"]["nodeName"]
        _cordon(stage, node, on=True)
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": meta["name"]}}
        try:
            stage.cluster.call("POST", f"{stage.scratch.root}/pods/{meta['name']}/eviction", None, body)
            stage.note(f"pod {meta['name']} evicted")
            stage.wait("end of the evicted pod", partial(_on_its_way, stage, pod), 120)
        finally:
            _cordon(stage, node, on=False)
        return f"node {node} cordoned, pod {meta['name']} evicted, node uncordoned"

    stage.start()
    return _ended(stage, act, ("Evicted", "PodLost"))


def _cordon(stage: Stage, node: str, *, on: bool) -> None:
    body = {"spec": {"unschedulable": on}}
    try:
        stage.cluster.call("PATCH", f"/api/v1/nodes/{node}", None, body, "application/merge-patch+json")
    except ClusterError as exc:
        raise NotRunError(f"needs the right to cordon node {node}: {exc}") from exc


def _on_its_way(stage: Stage, pod: JsonObject) -> bool:
    found = stage.cluster.call("GET", f"{stage.scratch.root}/pods/{pod['metadata']['name']}", missing=True)
    return found is None or "deletionTimestamp" in found["metadata"]


def out_of_memory(stage: Stage) -> Seen:
    """A rank takes more memory than its container has."""

    def act(stage: Stage, pod: JsonObject) -> str:
        stage.wish("memory", pod)
        killed = stage.wait("death for memory", partial(_oom_killed, stage, pod), 180)
        stage.note(killed)
        return killed

    stage.start(ranks=1, memory="1Gi")
    return _ended(stage, act, ("OOMKilled",))


def _oom_killed(stage: Stage, pod: JsonObject) -> str:
    """The kubelet's or the sidecar's word."""
    status = stage.sidecar()
    if status is not None and status.oom_kills:
        return f"{status.oom_kills} processes of the pod were killed for memory (cgroup)"
    found = stage.cluster.call("GET", f"{stage.scratch.root}/pods/{pod['metadata']['name']}", missing=True)
    for container in ((found or {}).get("status") or {}).get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            return "the trainer's container ended as OOMKilled"
    cause = (stage.status.get("attempt") or {}).get("cause")
    return "the operator saw OOMKilled" if cause == "OOMKilled" else ""


def rank_hangs(stage: Stage) -> Seen:
    """A rank stops and says nothing."""
    stage.start(restart={"hangTimeoutSeconds": 20})
    return _ended(stage, lambda stage, pod: stage.signal_rank(pod, "STOP"), ("Hung",))


def pod_preempted(stage: Stage) -> Seen:
    """A pod of higher priority needs all GPUs of the node."""
    trainer = next(c for c in stage.scratch.settings.template["containers"] if c["name"] == "trainer")
    limits = (trainer.get("resources") or {}).get("limits") or {}
    gpu = next((name for name in limits if "/" in name), "")
    if not gpu:
        raise NotRunError(
            "the template asks for no GPUs, of which a pod of higher priority could take a node's"
        )
    stage.start()
    name = f"{stage.scratch.name}-high"

    def act(stage: Stage, pod: JsonObject) -> str:
        node = pod["spec"]["nodeName"]
        body = _preemptor(stage, trainer["image"], node, gpu, name)
        stage.cluster.call("POST", f"{stage.scratch.root}/pods", None, body)
        stage.wait("preemption", partial(_on_its_way, stage, pod), 120)
        stage.note("preempted")
        return f"a pod of priority class {name} asked for all {gpu} of {node}"

    _priority_class(stage, name)
    try:
        return _ended(stage, act, ("Preempted",), after=lambda: _remove_preemptor(stage))
    finally:
        _remove_preemptor(stage)
        stage.cluster.call("DELETE", f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}", missing=True)


def _priority_class(stage: Stage, name: str) -> None:
    body = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": 100000,
    }
    try:
        stage.cluster.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", None, body)
    except ClusterError as exc:
        raise NotRunError(f"needs the right to create a PriorityClass: {exc}") from exc


def _preemptor(stage: Stage, image: str, node: str, gpu: str, priority: str) -> JsonObject:
    found = stage.cluster.call("GET", f"/api/v1/nodes/{node}") or {}
    all_of_them = found["status"]["allocatable"][gpu]
    container = {
        "name": "idle",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "600"],
        "resources": {"limits": {gpu: all_of_them}},
    }
    template = stage.scratch.settings.template
    kept: JsonObject = {k: template[k] for k in ("tolerations", "imagePullSecrets") if k in template}
    spec: JsonObject = {
        **kept,
        "priorityClassName": priority,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 1,
        "restartPolicy": "Never",
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "drill-preemptor"}, "spec": spec}


def _remove_preemptor(stage: Stage) -> None:
    path = f"{stage.scratch.root}/pods/drill-preemptor"
    stage.cluster.call("DELETE", path, {"gracePeriodSeconds": "0"}, missing=True)


def node_lost(stage: Stage) -> Seen:
    """A node cannot be reached any more; half the ranks go on."""
    settings = stage.scratch.settings
    if not (settings.cut_node and settings.heal_node):
        raise NotRunError("no API cuts a node off: say how with --cut-node and --heal-node")
    cut: list[str] = []

    def act(stage: Stage, pod: JsonObject) -> str:
        node = pod["spec"]["nodeName"]
        cut.append(node)
        _shell(settings.cut_node, node)
        stage.note(f"node {node} cut off")
        return f"`{settings.cut_node}` for node {node}"

    stage.start(nodes=2, ranks=1, elastic={"minNodes": 1, "scaleDownDelaySeconds": 5})
    try:
        return _ended(stage, act, ("NodeLost",), victim=_away_from_operators)
    finally:
        for node in cut:
            _shell(settings.heal_node, node)


def _away_from_operators(stage: Stage) -> JsonObject:
    """A pod on a node without an operator, where that can be seen: what is drilled is the job."""
    query = {"labelSelector": "app.kubernetes.io/name=rtj-operator"}
    try:
        operators = (stage.cluster.call("GET", "/api/v1/pods", query) or {}).get("items") or []
    except ClusterError:
        operators = []  # without that right any node will do
    theirs = {pod["spec"].get("nodeName") for pod in operators}
    pods = stage.pods()
    return next((pod for pod in reversed(pods) if pod["spec"]["nodeName"] not in theirs), pods[-1])


def _shell(command: str, node: str) -> None:
    """Run a command of the caller for a node. Raises DrillError."""
    try:
        done = subprocess.run(
            ["sh", "-c", command.replace("{node}", node)],
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise DrillError(f"`{command}` for {node} did not end within {_COMMAND_SECONDS} s") from exc
    if done.returncode:
        raise DrillError(f"`{command}` for {node} ended with {done.returncode}: {done.stderr[-500:]}")


def _ended(
    stage: Stage,
    act: Act,
    causes: tuple[str, ...],
    *,
    victim: Callable[[Stage], JsonObject] = lambda stage: stage.pods()[0],
    after: Callable[[], None] = lambda: None,
) -> Seen:
    """Do it to a pod of a job that trains and has committed; the next attempt must name one of `causes`."""
    first = stage.trains()
    safe = stage.commit()
    stage.steps_told(first.seq, safe.step + 3)
    pod = victim(stage)
    fault = time.monotonic()
    fired = act(stage, pod)
    after()
    second, heard = stage.resumed(first)
    lost = stage.lost(first, second)
    restored = second.restore.step if second.restore else 0
    stage.commit(beyond=restored, epoch=second.seq)
    checks = [
        Check(
            name="it goes on from the newest commit",
            holds=restored >= safe.step,
            seen=f"attempt {second.attempt} on {second.topology.mesh.world_size} ranks from step {restored}",
        ),
        Check(
            name="the cause is shown",
            holds=second.cause.value in causes,
            seen=f"{second.cause.value} ({_told(stage, first)})",
        ),
        *stage.proofs(),
    ]
    return stage.seen(fired, checks, lost, heard - fault)


def _told(stage: Stage, first: Attempt) -> str:
    """What the status says of the end."""
    ended = [a for a in stage.status.get("attempts") or [] if a.get("attempt") == first.attempt]
    return str(ended[0].get("message", "")) if ended else "status.attempts does not hold it"

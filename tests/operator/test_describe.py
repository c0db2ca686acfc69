"""`kubectl describe rtj` alone explains any stuck job: each cause names object, value, limit and next step.

Read is what a user reads, the message, the conditions and the events, as the decision for that situation makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_cluster import job_object
from operator_values import NOW, Situation, end_report, job, pod, running, sidecar
from test_causes import after, failing

from rtj_operator.api import JobStatus, parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.api.validation import validate
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import Event
from rtj_operator.decide.observed import ContainerEnd, PodView
from rtj_operator.decide.trouble import Trouble, troubled
from rtj_operator.decide.view import View
from rtj_operator.fencetrouble import PlanRefused, trouble
from rtj_operator.mesh import plan_size
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.store.base import UnavailableError


def read(status: JobStatus, events: tuple[Event, ...]) -> str:
    """The lines that describe shows."""
    lines = [f"Message: {status.message}"]
    lines += [f"{c.type}={c.status} {c.reason}: {c.message}" for c in status.conditions]
    lines += [f"{'Warning' if e.warning else 'Normal'} {e.reason}: {e.message}" for e in events]
    return "\n".join(lines)


def told(decision: Decision) -> str:
    return read(decision.status, decision.events)


def lost(**changes: Any) -> str:
    """Pod sft-p1-1 on node2 goes while the attempt runs."""
    pods = (pod(0, plan=True, status=sidecar(0)), pod(1, plan=True, deleting=True, **changes))
    return told(running().with_nonce("nonce-2").seeing(jobs=1, pods=pods).decide())


def before_the_first_attempt(*pods: PodView, **spec: Any) -> str:
    start = Situation().specified(**spec)
    return told(start.after(start.decide()).seeing(jobs=1, pods=pods).decide())


def with_memory(amount: str) -> dict[str, Any]:
    resources = {"limits": {"memory": amount}}
    container = {"name": "trainer", "image": "x", "command": ["train.py"], "resources": resources}
    return {"template": {"spec": {"containers": [container]}}}


def preempted() -> str:
    text = "default-scheduler: preempting to accommodate a higher priority pod"
    return lost(disruption="PreemptionByScheduler", disruption_message=text, trainer_end=ContainerEnd(137))


def evicted() -> str:
    return lost(evicted="The node was low on resource: memory. Threshold quantity: 100Mi, available: 52Mi")


def drained() -> str:
    return lost(
        disruption="EvictionByEvictionAPI",
        disruption_message="Eviction API: evicting",
        node_cordoned=True,
        trainer_end=ContainerEnd(137),
    )


def node_lost() -> str:
    return lost(node_lost=True)


def silent() -> str:
    answer = sidecar(0, lost_peers=[1])
    pods = (pod(0, plan=True, status=answer), pod(1, plan=True, silent=14.0))
    return told(running().with_nonce("nonce-2").seeing(jobs=1, pods=pods).decide())


def oom_trainer() -> str:
    pods = failing("Killed", exit_code=-9)
    assert pods[1].status is not None
    assert pods[1].status.outcome is not None
    failure = pods[1].status.outcome.failure
    assert failure is not None
    killed = pods[1].status.outcome.model_copy(
        update={"oom_kills": 1, "failure": failure.model_copy(update={"signal": "SIGKILL"})}
    )
    ended = replace(pods[1], status=pods[1].status.model_copy(update={"outcome": killed}))
    return told(after((pods[0], ended), **with_memory("64Gi")))


def oom_sidecar() -> str:
    return told(
        after(failing("SidecarLost", sidecar_end=ContainerEnd(137, "OOMKilled"), sidecar_ended_at=NOW + 5))
    )


def image() -> str:
    stuck = pod(
        1,
        up=False,
        waiting_reason="ImagePullBackOff",
        waiting_message='Back-off pulling image "registry/sft:2": not found',
    )
    return before_the_first_attempt(pod(0), stuck)


def container() -> str:
    text = 'secret "rtj-data" not found'
    return before_the_first_attempt(
        pod(0), pod(1, up=False, waiting_reason="CreateContainerConfigError", waiting_message=text)
    )


def unschedulable() -> str:
    text = "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    return before_the_first_attempt(pod(0), pod(1, up=False, scheduled=False, unschedulable=text))


def unschedulable_at_the_least() -> str:
    text = "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    start = Situation().wanting(elastic=False, sizes=(2,))
    stuck = (pod(0), pod(1, up=False, scheduled=False, unschedulable=text))
    return told(start.after(start.decide()).seeing(jobs=1, pods=stuck).decide())


def quota() -> str:
    sentence = (
        'pods "sft-p1-1-x" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=8, '
        "used: requests.nvidia.com/gpu=56, limited: requests.nvidia.com/gpu=60"
    )
    start = Situation()
    return told(start.after(start.decide()).seeing(jobs=(job(1, 2, refused=sentence),), pods=()).decide())


def hung() -> str:
    stuck = running().specified(restart={"hangTimeoutSeconds": 600}).still(700)
    first = stuck.decide()
    last = stuck.after(first).later(6).with_nonce("nonce-2").decide()
    return told(first) + "\n" + told(last)


def user_code() -> str:
    return told(after(failing()))


def user_code_again_and_again() -> str:
    worn = (
        running(without_progress=2).with_nonce("nonce-2").specified(restart={"maxAttemptsWithoutProgress": 3})
    )
    return told(worn.seeing(jobs=1, pods=failing()).decide())


def backing_off() -> str:
    worn = running(without_progress=1).with_nonce("nonce-2")
    failed = worn.seeing(jobs=1, pods=failing())
    first = failed.decide()
    return told(failed.after(first).later(1).decide())


def resume_refused() -> str:
    report = end_report(OutcomeKind.RESUME_REFUSED)
    text = "2 differences: parameter layers.3.weight: saved [4096, 4096], built [4096, 2048]; 1 missing: head.bias"
    outcome = Outcome(epoch=report.epoch, attempt=1, kind=OutcomeKind.RESUME_REFUSED, message=text)
    pods = tuple(
        pod(i, plan=True, status=report.model_copy(update={"pod_index": i, "outcome": outcome}))
        for i in (0, 1)
    )
    return told(running().seeing(jobs=1, pods=pods).decide())


def refused_at_the_store(exc: Exception) -> str:
    start = Situation()
    begun = start.after(start.decide()).seeing(jobs=1, pods=(pod(0), pod(1)))
    decision = begun.decide()
    view = View(begun.meta, begun.spec, begun.wanted, (), decision.status, begun.observed, NOW, "nonce-1")
    found = trouble(exc)
    status, event = troubled(view, decision.status, Trouble(found.reason, str(found), found.final))
    return read(status, (event,))


def store_away() -> str:
    text = (
        "s3://bucket/team: ns/sft/journal/: cannot be reached: check endpoint, DNS, proxy and network policy"
    )
    return refused_at_the_store(UnavailableError(text))


def grace() -> str:
    slow = running()
    status = slow.status.model_copy(update={"save_seconds": 100.0})
    slow = replace(slow, status=status).wanting(own_grace=True)
    return told(slow.later(70).stepping(12).decide())


def refused_spec(**spec: Any) -> str:
    raw = job_object()
    raw["spec"] |= spec
    found = tuple(f"{p.reason}: {p.sentence}" for p in validate(parse_job(raw), OperatorDefaults()))
    return told(replace(Situation(), problems=found, wanted=None).decide())


def no_mesh() -> str:
    elastic = {"minNodes": 2, "maxNodes": 8}
    return refused_spec(
        nodes=6, ranksPerNode=8, parallelism={"tp": 8}, batch={"globalBatchSize": 512}, elastic=elastic
    )


def mesh_that_may_not_resume() -> str:
    raw = job_object()
    raw["spec"] |= {"nodes": 4, "ranksPerNode": 8, "parallelism": {"tp": 4}, "batch": {"globalBatchSize": 64}}
    spec = effective(parse_job(raw), OperatorDefaults())
    batch = Batch(global_batch_size=64, micro_batch_size=16, accumulation=1)
    saved = Topology(nodes=4, ranks_per_node=8, mesh=Mesh(dp=4, tp=8), batch=batch)
    refusal = plan_size(spec.mesh, 4, saved, spec.matrix)
    return refused_at_the_store(PlanRefused(getattr(refusal, "sentence", "")))


def not_valid() -> str:
    template = {
        "spec": {"containers": [{"name": "trainer", "image": "x", "command": ["python", "train.py"]}]}
    }
    return refused_spec(template=template)


@dataclass(frozen=True)
class Case:
    """What describe must name."""

    situation: Callable[[], str]
    names: tuple[str, ...]
    """Object, value and limit."""
    next_step: str


BY_ITSELF = "by itself, and this counts as no failure"
CASES = (
    Case(preempted, ("Preempted: pod sft-p1-1 on node node2", "higher priority pod"), f"goes on {BY_ITSELF}"),
    Case(
        evicted,
        ("Evicted: pod sft-p1-1 on node node2", "Threshold quantity: 100Mi, available: 52Mi"),
        "kubectl describe node node2",
    ),
    Case(
        drained,
        ("Drained: pod sft-p1-1", "node node2 is being drained", "Eviction API"),
        f"goes on elsewhere {BY_ITSELF}",
    ),
    Case(
        node_lost,
        ("NodeLost: pod sft-p1-1 on node node2", "the node is not ready"),
        "kubectl describe node node2",
    ),
    Case(
        silent,
        ("NodeLost: pod sft-p1-1 on node node2", "nothing heard of it for 14 s"),
        "kubectl describe node node2",
    ),
    Case(
        oom_trainer,
        ("OOMKilled: pod sft-p1-1 on node node2: rank 1", "memory limit of 64Gi"),
        "raise it in the template, or lower batch.maxMicroBatchSize",
    ),
    Case(
        oom_sidecar,
        ("SidecarOOMKilled: pod sft-p1-1 on node node2", "the sidecar was OOM-killed"),
        "give it more with the chart's value sidecar.memory, or set checkpoint.staging.size",
    ),
    Case(
        image,
        ("ImagePullFailed: pod sft-p1-1", 'pulling image "registry/sft:2": not found'),
        "correct the image or imagePullSecrets in spec.template",
    ),
    Case(
        container,
        ("ContainerStartFailed: pod sft-p1-1", 'secret "rtj-data" not found'),
        "make what is missing, or correct spec.template",
    ),
    Case(
        unschedulable,
        ("Unschedulable: 1 of the pods", "0/5 nodes are available: 5 Insufficient nvidia.com/gpu"),
        "with at most 1 node it goes on once that has lasted scaleDownDelaySeconds 60",
    ),
    Case(
        unschedulable_at_the_least,
        ("Unschedulable: 1 of the pods", "5 Insufficient nvidia.com/gpu", "at least 2 nodes of 2 are needed"),
        "free some, or lower spec.nodes or minNodes",
    ),
    Case(
        quota,
        (
            'QuotaExceeded: pods "sft-p1-1-x"',
            "exceeded quota: team",
            "used: requests.nvidia.com/gpu=56, limited: requests.nvidia.com/gpu=60",
        ),
        "raise the quota, or lower spec.nodes or the trainer's limits",
    ),
    Case(
        hung,
        ("Hung: no step after 10 for", "hangTimeoutSeconds 600", "1 failure without a newer commit (limit"),
        "kubectl logs -n ns -l resumabletraining.io/job=sft -c trainer --prefix --tail=-1 shows where each rank stood",
    ),
    Case(
        user_code,
        (
            "Failed: pod sft-p1-1 on node node2: rank 1 ended with exit code 1",
            "RuntimeError: NCCL watchdog",
            "1 failure without a newer commit (limit",
            "maxAttemptsWithoutProgress",
        ),
        "kubectl logs -n ns -l resumabletraining.io/job=sft",
    ),
    Case(
        user_code_again_and_again,
        (
            "Failed=True TooManyFailures: 3 failures without a newer commit (limit 3)",
            "rank 1 ended with exit code 1",
        ),
        "Nothing more is started until the spec changes",
    ),
    Case(
        backing_off,
        ("BackingOff: next attempt in", "2 failures without a newer commit", "last: Failed: pod sft-p1-1"),
        "next attempt in",
    ),
    Case(
        resume_refused,
        (
            "Failed=True ResumeRefused: pod sft-p1-0",
            "layers.3.weight: saved [4096, 4096], built [4096, 2048]",
            "head.bias",
        ),
        "Set back what differs, or start a run of its own with another checkpoint.runId",
    ),
    Case(
        store_away,
        ("Degraded=True StoreUnavailable", "s3://bucket/team: ns/sft/journal/", "cannot be reached"),
        "check endpoint, DNS, proxy and network policy; it is tried again by itself, and ranks that train go on",
    ),
    Case(
        grace,
        (
            "Degraded=True GraceTooShort",
            "took 100 s from stage to commit",
            "placement 1 have a grace period of 120 s",
        ),
        "set template.spec.terminationGracePeriodSeconds to 300 or more",
    ),
    Case(
        no_mesh,
        ("Valid=False BatchNotDivisible", "dp 6", "batch.globalBatchSize 512"),
        "the nearest sizes that work: 4, 8: change batch.globalBatchSize, parallelism or the sizes",
    ),
    Case(
        mesh_that_may_not_resume,
        ("Degraded=True TransitionBlocked", "tp"),
        "add it to resumeCompatibility once it is verified",
    ),
    Case(
        not_valid,
        ("Valid=False CommandStartsProcess", "container trainer", "'python'"),
        "write command: [train.py]",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.situation.__name__)
def test_describe_names_the_object_the_value_the_limit_and_the_next_step(case: Case) -> None:
    text = case.situation()
    print(text)
    missing = [part for part in (*case.names, case.next_step) if part not in text]
    assert not missing, text
    assert "None" not in text
    assert len(max(text.splitlines(), key=len)) < 1400, "a sentence, not a page"


def test_an_attempts_end_says_what_was_decided_and_not_its_opposite() -> None:
    evicted = replace(pod(1, plan=True, up=False), phase="Failed", evicted="low on memory", node="")
    rules = {"restart": {"rules": [{"causes": ["Evicted"], "action": "Fail"}]}}
    for spec, follows in (
        ({}, "the job goes on by itself, and this counts as no failure"),
        (rules, "the job fails"),
    ):
        decision = after((pod(0, plan=True, status=sidecar(0)), evicted), **spec)
        ended = next(e.message for e in decision.events if e.reason == "AttemptEnded")
        assert ended.endswith(f"low on memory; {follows}"), "and names no node that is not known"

"""A queue (Kueue) admits, preempts and shrinks a placement's Job: nothing is burnt, the plan is of what there is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fake_kube import FakeKube
from operator_values import (
    NOW,
    end_report,
    job,
    plan,
    pod,
    pods,
    rooms,
    running,
    spec,
)
from queued_values import LONG_AGO, QUEUE, RESUMED, effects, ending, preempted, queued, training, waiting

from rtj_operator.api import Phase
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import (
    CreateJob,
    DeleteJob,
    FenceAndPublish,
    PublishOrder,
    PublishPlan,
)
from rtj_operator.decide.observed import JobView
from rtj_operator.kube import WORKLOADS
from rtj_operator.podview import job_view
from rtj_operator.queuewords import QueueWords, queue_words
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import OutcomeKind


def test_a_placement_that_waits_says_what_its_queue_says_and_is_looked_at_now_and_then() -> None:
    seen = queued().seeing(jobs=(waiting(says="insufficient unused quota for nvidia.com/gpu"),), pods=())
    decision = seen.decide()
    status = decision.status
    assert (status.phase, status.reason) == (Phase.PENDING, Reason.QUEUED)
    assert status.message == (
        "Job sft-p1 is suspended: queue gpus has not admitted it yet: insufficient unused quota for nvidia.com/gpu"
    )
    assert decision.requeue_after == 5.0
    (event,) = [e for e in decision.events if e.reason == EventReason.WAITING]
    assert not event.warning
    assert "insufficient unused quota" in event.message
    assert next(c for c in status.conditions if c.type == "Degraded").status == "False"


def test_a_job_that_is_being_preempted_waits_for_the_save_of_its_pods() -> None:
    seen = training().seeing(jobs=(waiting(),), pods=ending(None))
    decision = seen.decide()
    assert decision.status.phase is Phase.SAVING
    assert not [a for a in decision.actions if isinstance(a, CreateJob | DeleteJob | PublishOrder)]


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [(OutcomeKind.SAVED_AND_STOPPED, "Saved"), (OutcomeKind.STOPPED, "Stopped"), (None, "Preempted")],
)
def test_a_preempted_job_keeps_its_placement_and_burns_nothing(
    kind: OutcomeKind | None, outcome: str
) -> None:
    after = preempted(kind)
    status, record = after.status, after.status.attempts[-1]
    assert record.outcome == outcome
    assert "its queue suspended Job sft-p1 (Preempted to accommodate another)" in (record.message or "")
    assert (status.counters.failures, status.counters.without_progress, status.counters.preemptions) == (
        0,
        0,
        1,
    )
    assert (status.phase, status.reason) == (Phase.PENDING, Reason.QUEUED)
    assert status.retry_at is None
    assert status.placement is not None
    assert (status.placement.number, status.placement.cause) == (1, Cause.PREEMPTED)
    for later in (
        after,
        after.seeing(jobs=(waiting(),), pods=ending(kind, gone=True)),
        after.seeing(jobs=(waiting(),), pods=()),
    ):
        assert not effects(later, CreateJob, DeleteJob, FenceAndPublish, PublishPlan)
        assert later.decide().status.placement == status.placement


def test_a_job_that_is_preempted_before_an_attempt_has_begun_waits_again_and_counts_nothing() -> None:
    """Admitted, its pods start, and the queue takes them back: the page says that this is no preemption."""
    admitted = (
        queued().later(5).seeing(jobs=(job(1, 2, resumed_at=RESUMED),), pods=(pod(0), pod(1, up=False)))
    )
    starting = admitted.after(admitted.decide())
    assert starting.status.phase is Phase.STARTING
    taken = starting.later(5).seeing(jobs=(waiting(says="Preempted to accommodate another"),), pods=())
    status = taken.decide().status
    assert (status.phase, status.reason) == (Phase.PENDING, Reason.QUEUED)
    assert "Preempted to accommodate another" in (status.message or "")
    assert (status.counters.preemptions, status.counters.attempts, len(status.attempts)) == (0, 0, 0)
    assert status.placement is not None
    assert status.placement.number == 1, "its place in the queue stays"


@pytest.mark.parametrize("gone", [True, False])
def test_a_preempted_job_that_is_admitted_again_starts_the_next_attempt_in_the_same_job(gone: bool) -> None:
    """Whether the watch has seen the old pods go or not."""
    old = ending(OutcomeKind.SAVED_AND_STOPPED, gone=True) if gone else ()
    back = job(1, 2, resumed_at=RESUMED)
    young = tuple(replace(pod(i), uid=f"young-{i}", created_at=RESUMED) for i in range(2))
    seen = preempted().later(60).with_nonce("nonce-2")
    starting = seen.seeing(jobs=(back,), pods=(*old, replace(young[0], trainer_running=False)))
    assert not effects(starting, CreateJob, DeleteJob)
    (fence,) = effects(seen.seeing(jobs=(back,), pods=(*old, *young)), FenceAndPublish)
    assert (fence.nonce, fence.cause, fence.placement, fence.nodes) == ("nonce-2", Cause.PREEMPTED, 1, 2)


def test_a_suspension_that_nobody_saw_is_told_by_the_pods_that_are_there() -> None:
    """The operator was away: the Job has been started again, its pods carry no plan."""
    young = tuple(replace(pod(i), uid=f"young-{i}", created_at=RESUMED) for i in range(2))
    seen = training().later(60).seeing(jobs=(job(1, 2, resumed_at=RESUMED),), pods=young)
    decision = seen.decide()
    record = decision.status.attempts[-1]
    assert (record.outcome, decision.status.counters.failures) == ("Preempted", 0)
    (fence,) = effects(seen.after(decision).with_nonce("nonce-2"), FenceAndPublish)
    assert fence.nonce == "nonce-2"
    assert fence.cause is Cause.PREEMPTED


def test_a_pod_that_is_lost_from_an_admitted_job_makes_a_new_placement_as_ever() -> None:
    lost = (replace(training().observed.pods[0], deleting=True, gone=True), training().observed.pods[1])
    seen = training().seeing(jobs=(job(1, 2, resumed_at=LONG_AGO),), pods=lost)
    assert [a.placement for a in effects(seen, CreateJob)] == [2]
    assert seen.decide().status.attempts[-1].outcome == "PodLost"


def test_a_rank_that_failed_while_its_job_was_preempted_counts_and_the_placement_stays() -> None:
    found = pods(2, plan=True, status=end_report(OutcomeKind.FAILED))
    seen = training().seeing(jobs=(waiting(),), pods=tuple(replace(p, created_at=LONG_AGO) for p in found))
    decision = seen.decide()
    assert decision.status.counters.failures == 1
    assert not [a for a in decision.actions if isinstance(a, CreateJob | FenceAndPublish)]
    assert decision.status.placement is not None
    assert decision.status.placement.number == 1


def test_the_late_plan_takes_the_size_that_was_admitted() -> None:
    seen = queued().seeing(jobs=(job(1, 1, resumed_at=LONG_AGO),), pods=())
    decision = seen.decide()
    placement = decision.status.placement
    assert placement is not None
    assert (placement.nodes, placement.requested_nodes, placement.wanted_nodes) == (1, 2, 2)
    assert not [a for a in decision.actions if isinstance(a, CreateJob | DeleteJob)]
    assert [e.message for e in decision.events if e.reason == EventReason.RESIZING] == [
        "queue gpus admitted 1 of 2 pods"
    ]
    up = seen.after(decision).seeing(
        jobs=(job(1, 1, resumed_at=LONG_AGO),), pods=(replace(pod(0), created_at=NOW),)
    )
    (fence,) = effects(up, FenceAndPublish)
    assert fence.nodes == 1


@pytest.mark.parametrize("requested", [2, None], ids=["fewer were admitted", "nodes were missing"])
def test_a_job_in_a_queue_does_not_give_up_its_quota_to_grow_into_nodes_that_have_room(
    requested: int | None,
) -> None:
    small = running(nodes=1)
    assert small.status.placement is not None
    for inside in (QUEUE, spec()):
        placement = small.status.placement.model_copy(
            update={"nodes": 1, "requested_nodes": requested, "wanted_nodes": 2}
        )
        live = (replace(small.observed.pods[0], plan=plan(nodes=1)),)
        seen = replace(
            small, spec=inside, status=small.status.model_copy(update={"placement": placement, "nodes": 1})
        )
        seen = seen.seeing(jobs=(job(1, 1, resumed_at=LONG_AGO),), pods=live, capacity=rooms(a=4))
        once = seen.after(seen.decide())
        grown = once.later(400)
        assert bool(effects(grown, PublishOrder)) == (inside != QUEUE)


def test_one_that_is_admitted_in_full_again_is_as_large_as_it_was() -> None:
    first = queued().seeing(jobs=(job(1, 1, resumed_at=LONG_AGO),), pods=())
    again = first.after(first.decide()).seeing(jobs=(waiting(),), pods=())
    assert again.decide().status.placement == again.status.placement, (
        "a Job that waits has its full size, and that says nothing"
    )
    full = again.seeing(jobs=(job(1, 2, resumed_at=RESUMED),), pods=())
    placement = full.decide().status.placement
    assert placement is not None
    assert (placement.nodes, placement.requested_nodes) == (2, None)


def test_a_size_that_does_not_work_gets_a_job_of_the_next_smaller_one() -> None:
    seen = queued(4)
    seen = seen.wanting(sizes=(2, 4), min_nodes=2).seeing(jobs=(job(1, 3, resumed_at=LONG_AGO),), pods=())
    decision = seen.decide()
    assert [a.nodes for a in decision.actions if isinstance(a, CreateJob)] == [2]
    assert decision.status.placement is not None
    assert decision.status.placement.requested_nodes == 4


def test_an_attempt_that_was_only_meant_is_meant_anew_when_the_pods_are_others() -> None:
    """What its fence may have written is for another number of pods."""
    up = queued().seeing(
        jobs=(job(1, 2, resumed_at=LONG_AGO),), pods=tuple(replace(p, created_at=NOW) for p in pods(2))
    )
    meant = up.after(up.decide())
    assert meant.status.attempt is not None
    suspended = meant.seeing(jobs=(waiting(),), pods=())
    ended = suspended.after(suspended.decide())
    assert ended.status.attempts[-1].outcome == "Preempted"
    one = ended.with_nonce("nonce-2").seeing(
        jobs=(job(1, 1, resumed_at=RESUMED),), pods=(replace(pod(0), created_at=RESUMED),)
    )
    settled = one.after(one.decide())
    (fence,) = effects(settled, FenceAndPublish)
    assert (fence.nonce, fence.nodes) == ("nonce-2", 1)


def test_a_job_view_knows_when_it_was_started_again() -> None:
    raw = {
        "metadata": {"name": "sft-p1", "uid": "u", "labels": {"placement": "1"}},
        "spec": {"parallelism": 2, "completions": 2, "suspend": False},
        "status": {
            "conditions": [
                {"type": "Suspended", "status": "False", "lastTransitionTime": "2027-01-15T08:00:00Z"}
            ]
        },
    }
    view = job_view(raw, "placement")
    assert view is not None
    assert view.resumed_at == NOW
    raw["status"] = {
        "conditions": [{"type": "Suspended", "status": "True", "lastTransitionTime": "2027-01-15T08:00:00Z"}]
    }
    assert job_view(raw, "placement") == JobView("sft-p1", "u", 1, 2, pausing=True)


def conditions(**found: tuple[str, str]) -> dict[str, Any]:
    listed = [{"type": kind, "status": status, "message": text} for kind, (status, text) in found.items()]
    return {"status": {"conditions": listed}}


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ({}, ""),
        (conditions(QuotaReserved=("True", "Quota reserved in ClusterQueue team")), ""),
        (conditions(QuotaReserved=("False", "insufficient quota")), "insufficient quota"),
        (conditions(QuotaReserved=("False", "Preempted"), Evicted=("True", "Preempted")), "Preempted"),
        (
            conditions(QuotaReserved=("False", "no quota"), Evicted=("True", "Preempted")),
            "Preempted; no quota",
        ),
        (conditions(QuotaReserved=("True", "x"), Evicted=("True", "Preempted")), "Preempted"),
    ],
)
def test_the_words_of_a_workload(workload: dict[str, Any], words: str) -> None:
    assert queue_words(workload) == words


class Kueue(FakeKube):
    """Counts the lists of Workloads, by namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str | None] = []

    async def list(self, kind: Any, namespace: str | None, **kwargs: Any) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        self.asked.append(namespace)
        assert kwargs["labels"] == "kueue.x-k8s.io/job-uid"
        return await super().list(kind, namespace, **kwargs)


def waits(uid: str, namespace: str = "ns") -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": "q"}
    return {"metadata": {"name": uid, "namespace": namespace, "uid": uid, "labels": labels}}


def test_the_workloads_of_a_namespace_are_read_once_for_all_its_jobs_that_wait() -> None:
    kube, now = Kueue(), [1000.0]
    for uid, namespace in (("a", "ns"), ("b", "ns"), ("a", "other")):
        body = conditions(QuotaReserved=("False", f"no quota for {uid} in {namespace}"))
        labels = {"kueue.x-k8s.io/job-uid": uid}
        kube.put(
            WORKLOADS, {"metadata": {"name": f"job-{uid}", "namespace": namespace, "labels": labels}} | body
        )
    queue = QueueWords(kube, clock=lambda: now[0])

    async def ask() -> list[str]:
        jobs = (waits("a"), waits("b"), waits("c"), waits("a", "other"))
        return list(await asyncio.gather(*(queue.of(j) for j in jobs)))

    async def over_time() -> None:
        said = ["no quota for a in ns", "no quota for b in ns", "", "no quota for a in other"]
        assert await ask() == said
        assert sorted(map(str, kube.asked)) == ["ns", "other"]
        kube.objects.clear()
        now[0] += 3
        assert await ask() == said
        assert len(kube.asked) == 2
        now[0] += 2
        assert await ask() == [""] * 4
        assert len(kube.asked) == 4

    asyncio.run(over_time())


def test_a_namespace_whose_workloads_may_not_be_read_is_asked_seldom_and_silences_no_other() -> None:
    kube, now = Kueue(), [1000.0]
    kube.closed = {"closed"}
    kube.put(
        WORKLOADS,
        {"metadata": {"name": "job-a", "namespace": "ns", "labels": {"kueue.x-k8s.io/job-uid": "a"}}}
        | conditions(QuotaReserved=("False", "no quota")),
    )
    queue = QueueWords(kube, clock=lambda: now[0])
    for _ in range(3):
        assert asyncio.run(queue.of(waits("a", "closed"))) == ""
        assert asyncio.run(queue.of(waits("a"))) == "no quota"
        now[0] += 90
    assert kube.asked.count("closed") == 1
    now[0] += 300
    assert asyncio.run(queue.of(waits("a", "closed"))) == ""
    assert kube.asked.count("closed") == 2
    assert WORKLOADS.path("ns") == "/apis/kueue.x-k8s.io/v1beta2/namespaces/ns/workloads"


def test_a_job_of_which_kueue_makes_no_workload_says_what_to_look_at() -> None:
    """As with a WorkloadPriorityClass that does not exist, which Kueue tells its own log only."""
    kube, now = Kueue(), [1000.0]
    queue, named, plain = QueueWords(kube, clock=lambda: now[0]), waits("a"), waits("b")
    named["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"

    def ask() -> list[str]:
        return [asyncio.run(queue.of(job)) for job in (named, plain)]

    assert ask() == ["", ""]
    now[0] += 9
    assert ask() == ["", ""]
    now[0] += 1
    first, second = ask()
    assert first == (
        "Kueue has made no Workload of this Job: is there a WorkloadPriorityClass urgent (kubectl get "
        "workloadpriorityclass urgent), and does Kueue's controller run?"
    )
    assert "template.spec.priorityClassName" in second
    for uid, body in (("a", {}), ("b", conditions(QuotaReserved=("False", "no quota")))):
        meta = {"name": uid, "namespace": "ns", "labels": {"kueue.x-k8s.io/job-uid": uid}}
        kube.put(WORKLOADS, {"metadata": meta} | body)
    now[0] += 5
    assert ask() == ["", "no quota"]
    kube.objects.clear()
    now[0] += 9
    assert ask() == ["", ""], "the time begins anew"


def test_a_namespace_whose_workloads_cannot_be_read_is_not_said_to_have_none() -> None:
    kube, now = Kueue(), [1000.0]
    kube.closed = {"ns"}
    queue = QueueWords(kube, clock=lambda: now[0])
    for _ in range(3):
        assert asyncio.run(queue.of(waits("a"))) == ""
        now[0] += 400


def test_a_job_that_waits_long_is_looked_at_seldom() -> None:
    """Its admission is told by the watch: what the looks bring is the queue's words."""
    looks = {after: queued().later(after).decide().requeue_after for after in (1, 100, 300, 4000)}
    assert looks == {1: 5.0, 100: 10.0, 300: 30.0, 4000: 60.0}
    again = preempted().later(5000)
    assert again.decide().requeue_after == 60.0
    assert preempted().decide().requeue_after == 5.0

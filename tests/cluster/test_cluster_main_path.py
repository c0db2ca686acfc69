"""The main job: lose a rank, lose a node, go on with fewer GPUs, grow back, end, and prove that nothing was lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from network import SAMPLES
from replay import replay

from hack.cluster_world import START_SECONDS, Job, World
from hack.demo.faults import kill_rank, rank_pids
from trainer_sidecar.audit.continuity import prove_resumes
from trainer_sidecar.audit.history import prove_fenced, prove_newest_picked
from trainer_sidecar.audit.losses import loss_curve, prove_same_losses
from trainer_sidecar.audit.samples import consumed_samples, prove_exactly_once
from trainer_sidecar.contract.journal import Cause, Manifest, SaveReason
from trainer_sidecar.contract.plan import PLAN_ANNOTATION, Plan
from trainer_sidecar.contract.report import ResumeReport

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
STEPS = 300
INTERVAL = 10


@dataclass
class Story:
    """What was seen of the job while it went through its faults."""

    job: Job
    reports: dict[int, ResumeReport] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    columns: str = ""

    def resumed(self, attempt: int) -> ResumeReport:
        """The report of that attempt's resume, once the steps after it have been compared."""

        def verified(job: Job) -> ResumeReport | None:
            status = job.sidecar()
            report = status.resume if status and status.attempt == attempt else None
            return report if report and report.verified is not None else None

        def told(job: Job) -> bool:
            return (job.status.get("resume") or {}).get("verified") is not None

        report = self.job.wait(f"verified resume of attempt {attempt}", START_SECONDS, verified)
        self.reports[report.epoch] = report
        self.job.wait("the verdict in the status", 60, told)
        return report


@pytest.fixture(scope="module")
def story(world: World) -> Story:
    """A job on all GPUs that trains and has committed."""
    document = world.document(
        "main", nodes=2, ranks=2, gpus=2, steps=STEPS, interval=INTERVAL, env={"TEST_PACE": "/ledger/pace"},
        elastic={"minNodes": 1, "scaleDownDelaySeconds": 5, "scaleUpDelaySeconds": 3, "cooldownSeconds": 5},
    )  # fmt: skip
    job = world.job(document)
    job.pace(0.25)
    story = Story(job)
    job.wait_commit(beyond=INTERVAL)
    return story


def ranks(job: Job) -> dict[int, int]:
    """Rank to process id on this machine."""
    return {rank: pid for pod in job.pods for rank, pid in rank_pids(pod["metadata"]["uid"]).items()}


def until(reached: Callable[[], bool], seconds: float) -> float:
    """Seconds until it is reached; looks 50 times a second, since these processes are this machine's own."""
    start = time.monotonic()
    while not reached():
        assert time.monotonic() - start < seconds, f"not reached within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - start


def between_saves(job: Job) -> None:
    """Some steps behind the newest commit, and no save in flight: a fault then has steps to lose."""

    def between(job: Job) -> bool:
        status = job.sidecar()
        if status is None or status.in_flight or not status.progress or not status.last_committed:
            return False
        return 3 <= status.progress.step - status.last_committed.step < INTERVAL

    job.wait("step between two saves", START_SECONDS, between)


def test_an_interval_of_policy_auto_reaches_ranks_that_train_and_so_does_the_way_back(
    story: Story,
) -> None:
    job = story.job
    policy: dict[str, object] = {"intervalPolicy": "Auto", "intervalSeconds": 1}
    for wanted, changed in ((1.0, policy), (600.0, dict.fromkeys(policy))):
        job.patch(checkpoint=changed)

        def planned(job: Job, wanted: float = wanted) -> bool:
            plan = Plan.model_validate_json(job.pods[0]["metadata"]["annotations"][PLAN_ANNOTATION])
            return plan.checkpoint.interval_seconds == wanted

        job.wait(f"plan with an interval of {wanted:g} s", 60, planned)
        if changed is policy:
            job.wait("commit at a step that the clock chose", 60, lambda job: job.committed % INTERVAL != 0)
            found = job.status["checkpointInterval"]
            assert (found["policy"], found["seconds"]) == ("Auto", 1)
            assert found["advisedSeconds"] >= 10
            assert 0 <= found["saveCostSeconds"] < 60
    job.wait("commit at a step of the interval", 60, lambda job: job.committed % INTERVAL == 0)


def test_a_killed_rank_is_relaunched_in_the_same_pods_and_the_resume_is_verified(
    story: Story, record_property: Callable[[str, object], None]
) -> None:
    job = story.job
    between_saves(job)
    pods = job.pods
    before = ranks(job)
    assert sorted(before) == [0, 1, 2, 3]
    kill_rank(pods[1]["metadata"]["name"], pods[1]["metadata"]["uid"], 3)

    def relaunched() -> bool:
        now = ranks(job)
        return len(now) == 4 and not set(now.values()) & set(before.values())

    seconds = until(relaunched, 60.0)
    record_property("seconds from SIGKILL to all trainers running", round(seconds, 2))
    print(f"\nfrom the SIGKILL of a rank to all 4 trainer processes started again: {seconds:.2f} s")
    job.wait_training(attempt=2)
    report = story.resumed(2)
    assert [pod["metadata"]["uid"] for pod in job.pods] == [pod["metadata"]["uid"] for pod in pods]
    assert report.verified, report
    status = job.status
    assert status["attempts"][0]["outcome"] == "Failed"
    assert "rank 3" in status["attempts"][0]["message"]
    assert "SIGKILL" in status["attempts"][0]["message"]
    assert status["attempts"][1]["cause"] == "RankFailed"
    assert job.condition("ResumeVerified")["status"] == "True"
    assert job.placements == ["main-p1"]


def test_a_node_that_is_cut_off_makes_the_job_go_on_with_half_the_ranks_and_twice_the_accumulation(
    story: Story, world: World
) -> None:
    job = story.job
    assert job.status["plan"]["accumulation"] == 1
    job.wait_commit(beyond=job.committed)
    between_saves(job)
    world.cluster.tool("node", "cut", "2")
    cut = time.monotonic()
    job.wait_training(attempt=3)
    print(f"\nfrom the cut of a node to training without it: {time.monotonic() - cut:.1f} s")
    report = story.resumed(3)
    status = job.status
    assert (status["nodes"], status["plan"]["dp"], status["plan"]["accumulation"]) == (1, 2, 2)
    assert [pod["spec"]["nodeName"] for pod in job.pods] == ["node1"]
    assert report.verified, report
    assert report.resharded
    assert all(check.passed for check in report.checks)
    assert status["attempts"][1]["outcome"] in ("NodeLost", "PodLost")
    assert job.condition("Degraded")["reason"] == "FewerNodes"
    story.columns = world.kubectl("get", "rtj", "main")


def test_the_columns_of_kubectl_get_tell_the_state_of_a_job(story: Story) -> None:
    head, row = story.columns.splitlines()
    assert head.split() == ["NAME", "PHASE", "NODES", "STEP", "RPO", "AGE"]
    assert max(len(head.rstrip()), len(row.rstrip())) <= 80, story.columns
    assert row.split()[:3] == ["main", "Running", "1"]
    assert " steps/" in row


def test_the_job_grows_back_by_saving_first_when_the_node_returns(story: Story, world: World) -> None:
    job = story.job
    job.wait_commit(beyond=job.committed)
    world.cluster.tool("node", "heal", "2")
    job.wait_training(attempt=4)
    report = story.resumed(4)
    status = job.status
    assert (status["nodes"], status["plan"]["dp"], status["plan"]["accumulation"]) == (2, 4, 1)
    assert report.verified, report
    assert status["attempts"][3]["cause"] == "Resized"
    fourth = job.attempts()[3]
    saved = next(e for e in job.entries() if isinstance(e, Manifest) and e.seq == fourth.restore.sequence)
    assert saved.reason is SaveReason.ORDER, "what it grew from was saved for that"


def test_the_job_completes_and_every_sample_was_consumed_exactly_once(story: Story) -> None:
    job = story.job
    job.pace(0.0)
    status = job.wait_phase("Complete")
    assert status["lastCommitted"]["step"] == STEPS
    assert job.condition("Complete")["status"] == "True"
    history, ledgers, entries = job.history(), job.ledgers(), job.entries()
    causes = [attempt.cause for attempt in history.attempts]
    assert causes[0] is Cause.FIRST
    assert causes[1] is Cause.RANK_FAILED
    assert causes[2] in (Cause.NODE_LOST, Cause.POD_LOST)
    assert causes[3:] == [Cause.RESIZED]
    batches = [consumed_samples(history.stretch_of(step), step, ledgers) for step in range(1, STEPS + 1)]
    undisturbed = replay(batches, STEPS)
    proofs = [
        prove_exactly_once(history, ledgers, dataset_size=SAMPLES),
        prove_fenced(entries),
        prove_newest_picked(entries),
        prove_resumes(history, story.reports),
        prove_same_losses(loss_curve(history, ledgers), undisturbed, tolerance=1e-4, steps=STEPS),
    ]
    print("\n" + "\n".join(str(proof) for proof in proofs))
    assert [str(proof) for proof in proofs if not proof.holds] == []


def test_each_transition_of_the_job_left_one_event(story: Story) -> None:
    reasons = [reason for reason, _ in story.job.events]
    counts = {reason: len(list(group)) for reason, group in itertools.groupby(sorted(reasons))}
    assert counts["StartedFromScratch"] == 1
    assert counts["AttemptStarted"] == 3, "each later one"
    assert counts["AttemptEnded"] == 2, "those that nobody ordered to end"
    assert counts["SaveOrdered"] == 1
    assert counts["Resumed"] == counts["ResumeVerified"] == 3
    assert counts["PlacementCreated"] == 1
    assert counts["Resizing"] == 2
    assert counts["Completed"] == 1

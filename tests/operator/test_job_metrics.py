"""How much would be lost now: in the status, and as metrics that outlive the pods."""

from __future__ import annotations

from dataclasses import replace

from operator_values import NOW, Situation, running
from prometheus_client import CollectorRegistry

from rtj_operator.api import Distance, Phase
from rtj_operator.job_metrics import JobMetrics

JOB = ("ns", "sft")


class Scraped:
    """The metrics of one job with this status, `later` seconds after NOW."""

    def __init__(self, situation: Situation, later: float = 0) -> None:
        self.metrics = JobMetrics(lambda: NOW + later)
        self.registry = CollectorRegistry()
        self.registry.register(self.metrics)
        self.metrics.saw(JOB, situation.status)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"job_namespace": "ns", "job_name": "sft", **labels})


def settled(situation: Situation) -> Situation:
    return situation.after(situation.decide())


def test_the_recovery_point_is_counted_from_the_newest_committed_and_the_newest_verified_commit() -> None:
    proven = settled(settled(running()).committing(step=40, sequence=5).verifying(step=40, sequence=5))
    newer = settled(proven.later(30).committing(step=100, sequence=9))
    now = settled(newer.later(70).stepping(130))
    point = now.status.recovery_point
    assert point is not None
    assert point.committed == Distance(steps=30, samples=240, seconds=70)
    assert point.verified == Distance(steps=90, samples=720, seconds=100)

    scraped = Scraped(now, later=500)
    assert scraped("rtj_recovery_point_steps", point="committed") == 30
    assert scraped("rtj_recovery_point_samples", point="verified") == 720
    assert scraped("rtj_recovery_point_seconds", point="committed") == 470, (
        "also when nothing is heard any more"
    )
    assert scraped("rtj_recovery_point_seconds", point="verified") == 500
    assert scraped("rtj_last_committed_step") == 100
    assert scraped("rtj_job_phase", phase="Running") == 1


def test_what_was_verified_and_is_quarantined_since_does_not_stay_the_proven_point() -> None:
    proven = settled(settled(running()).committing(step=40, sequence=5).verifying(step=40, sequence=5))
    assert proven.status.last_verified is not None
    without = settled(proven._reporting(last_verified=None))
    assert without.status.last_verified is None


def test_without_a_commit_everything_since_the_first_attempt_is_at_risk() -> None:
    young = settled(settled(running()).later(71).stepping(12))
    scraped = Scraped(young, later=300)
    assert scraped("rtj_recovery_point_steps", point="committed") == 12
    assert scraped("rtj_recovery_point_samples", point="verified") == 96
    assert scraped("rtj_recovery_point_seconds", point="committed") == 300
    point = young.status.recovery_point
    assert point is not None
    assert point.committed == point.verified == Distance(steps=12, samples=96, seconds=71)
    assert point.summary == "12 steps/71s"


def test_a_schedule_of_drills_is_shown_in_seconds() -> None:
    by_clock = settled(running().specified(drill={"everySeconds": 1800}).later(61).stepping(12))
    assert Scraped(by_clock)("rtj_drill_interval_seconds") == 1800
    by_commits = settled(running().specified(drill={"everyCommits": 3}).committing(step=40, sequence=5))
    assert Scraped(by_commits)("rtj_drill_interval_seconds") == 3 * 600
    sooner = {"everySeconds": 1900, "everyCommits": 3}
    by_both = settled(running().specified(drill=sooner).committing(step=40, sequence=5))
    assert Scraped(by_both)("rtj_drill_interval_seconds") == 3 * 600
    assert Scraped(settled(running().later(61).stepping(12)))("rtj_drill_interval_seconds") is None


def test_a_job_at_rest_has_nothing_at_risk_and_a_deleted_one_no_series() -> None:
    done = settled(running())
    scraped = Scraped(replace(done, status=done.status.model_copy(update={"phase": Phase.COMPLETE})))
    assert scraped("rtj_recovery_point_seconds", point="committed") is None
    assert scraped("rtj_job_attempts_total") == 1
    scraped.metrics.forget(JOB)
    assert scraped("rtj_job_attempts_total") is None

"""What the operator knows of each job as metrics: above all how much would be lost if everything stopped now.

Sidecars end with their pods, so what must outlive pods is served here, from the jobs' status. Ages are computed when
they are scraped: a job of which nothing is heard any more grows older on the graph, too. A deleted job's series end.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rtj_operator.api import CommitStatus, JobStatus, Phase
from rtj_operator.queue import Key

_JOB = ["job_namespace", "job_name"]
_POINTS = ("committed", "verified")
_UNSAFE = frozenset({Phase.PENDING, Phase.STARTING, Phase.RESTORING, Phase.RUNNING, Phase.SAVING})
"""Phases in which time or steps are at risk; a suspended or ended job has nothing to lose."""
_PHASE_SECONDS = ("detect", "schedule", "fence", "rendezvous", "restore", "first_step", "total")


class JobMetrics(Collector):
    """The newest status of every job that this operator has reconciled. Used from one event loop."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._jobs: dict[Key, JobStatus] = {}
        self._now = now

    def saw(self, key: Key, status: JobStatus) -> None:
        """Serve this status from now on."""
        self._jobs[key] = status

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._jobs.pop(key, None)

    def collect(self) -> Iterator[Metric]:
        """All families, also without a job."""
        yield from (_phases(self._jobs), *self._recovery(), *_counters(self._jobs), _seconds(self._jobs))
        yield from (_last_step(self._jobs), _verdicts(self._jobs), _degraded(self._jobs))
        yield from (_intervals(self._jobs), _wasted(self._jobs), _drills(self._jobs))

    def _recovery(self) -> Iterator[Metric]:
        """Distance from training now to the newest committed and the newest verified restore point."""
        text = "lost if everything stopped now, to the newest committed or verified restore point"
        steps = GaugeMetricFamily("rtj_recovery_point_steps", f"Steps {text}", labels=[*_JOB, "point"])
        samples = GaugeMetricFamily("rtj_recovery_point_samples", f"Samples {text}", labels=[*_JOB, "point"])
        seconds = GaugeMetricFamily("rtj_recovery_point_seconds", f"Seconds {text}", labels=[*_JOB, "point"])
        for key, status in self._jobs.items():
            if status.phase not in _UNSAFE:
                continue
            for name, point in zip(_POINTS, (status.last_committed, status.last_verified), strict=True):
                labels = [*key, name]
                if status.progress is not None:
                    steps.add_metric(labels, max(0, status.progress.step - (point.step if point else 0)))
                    done = point.samples if point else 0
                    samples.add_metric(labels, max(0, status.progress.samples - done))
                since = _since(status, point)
                if since is not None:
                    seconds.add_metric(labels, max(0.0, self._now() - since))
        yield from (steps, samples, seconds)


def _since(status: JobStatus, point: CommitStatus | None) -> float | None:
    """Unix seconds of the restore point; without one all time since the first attempt would be lost."""
    if point is not None:
        return point.time.timestamp()
    return status.started_at.timestamp() if status.started_at is not None else None


def _phases(jobs: dict[Key, JobStatus]) -> Metric:
    found = GaugeMetricFamily("rtj_job_phase", "1 for the phase that the job is in", labels=[*_JOB, "phase"])
    for key, status in jobs.items():
        if status.phase is not None:
            found.add_metric([*key, status.phase.value], 1)
    return found


def _degraded(jobs: dict[Key, JobStatus]) -> Metric:
    text = "1 while the job's condition Degraded is true, by its reason"
    found = GaugeMetricFamily("rtj_job_degraded", text, labels=[*_JOB, "reason"])
    for key, status in jobs.items():
        for condition in status.conditions:
            if condition.type == "Degraded" and condition.status == "True":
                found.add_metric([*key, condition.reason], 1)
    return found


def _counters(jobs: dict[Key, JobStatus]) -> Iterator[Metric]:
    """Those of the status: they survive the operator."""
    what = {
        "rtj_job_attempts": ("Attempts started", "attempts"),
        "rtj_job_failures": ("Ends that count as failures of the job", "failures"),
        "rtj_job_preemptions": ("Preemptions, evictions and lost nodes", "preemptions"),
        "rtj_job_restore_failures": ("Attempts that could not restore", "restore_failures"),
        "rtj_job_reprocessed_samples": (
            "Samples run again because a window could not be split",
            "reprocessed_samples",
        ),
        "resume_world_size_change": ("Resumes on another mesh than had saved", "reshards"),
    }
    for name, (text, field) in what.items():
        found = CounterMetricFamily(name, text, labels=_JOB)
        for key, status in jobs.items():
            found.add_metric(key, getattr(status.counters, field))
        yield found
    yield _gauge(
        jobs,
        "rtj_job_failures_without_progress",
        "Failures since the newest commit",
        lambda status: status.counters.without_progress,
    )


def _gauge(
    jobs: dict[Key, JobStatus], name: str, text: str, value: Callable[[JobStatus], float | None]
) -> Metric:
    """One value a job; a job for which it is None has no series."""
    found = GaugeMetricFamily(name, text, labels=_JOB)
    for key, status in jobs.items():
        if (known := value(status)) is not None:
            found.add_metric(key, known)
    return found


def _last_step(jobs: dict[Key, JobStatus]) -> Metric:
    return _gauge(
        jobs,
        "rtj_last_committed_step",
        "Step of the newest commit",
        lambda status: status.last_committed.step if status.last_committed else None,
    )


def _verdicts(jobs: dict[Key, JobStatus]) -> Metric:
    return _gauge(
        jobs,
        "rtj_resume_verified",
        "1 when the steps after the last resume matched those seen before, 0 when they differ",
        lambda status: status.resume.verified if status.resume else None,
    )


def _intervals(jobs: dict[Key, JobStatus]) -> Metric:
    text = "Seconds between two saves: what applies, and what is advised because it wastes least"
    found = GaugeMetricFamily("rtj_checkpoint_interval_seconds", text, labels=[*_JOB, "interval"])
    for key, status in jobs.items():
        known = status.checkpoint_interval
        for name, value in (("applies", known.seconds), ("advised", known.advised_seconds)) if known else ():
            if value is not None:
                found.add_metric([*key, name], value)
    return found


def _drills(jobs: dict[Key, JobStatus]) -> Metric:
    return _gauge(
        jobs,
        "rtj_drill_interval_seconds",
        "Seconds between two drills, as spec.drill asks for them",
        lambda status: status.recovery_point.drill_seconds if status.recovery_point else None,
    )


def _wasted(jobs: dict[Key, JobStatus]) -> Metric:
    return _gauge(
        jobs,
        "rtj_wasted_fraction",
        "Share of the time that saves, steps run again and restarts are expected to take",
        lambda status: status.checkpoint_interval.wasted_fraction if status.checkpoint_interval else None,
    )


def _seconds(jobs: dict[Key, JobStatus]) -> Metric:
    text = "Seconds of the newest attempt from the end of the one before to its first step, by phase"
    found = GaugeMetricFamily("rtj_attempt_seconds", text, labels=[*_JOB, "phase"])
    for key, status in jobs.items():
        seconds = status.attempts[-1].seconds if status.attempts else None
        for phase in _PHASE_SECONDS:
            value = getattr(seconds, phase, None)
            if value is not None:
                found.add_metric([*key, phase], value)
    return found

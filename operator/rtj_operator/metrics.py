"""All metrics of the operator's process, declared in one place; the reference page is made from here.

No label ever carries a name that lives longer than its job: causes and outcomes are closed sets. What is known of each
job is in `job_metrics`, and of its drills in `drills/metrics`.
"""

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rtj_operator.drills.metrics import DrillMetrics
from rtj_operator.job_metrics import JobMetrics


def _reconcile_seconds(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "rtj_operator_reconcile_seconds",
        "Seconds of one reconcile, by result (ok, conflict, retry, error).",
        ["result"],
        registry=registry,
        buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60),
    )


@dataclass
class OperatorMetrics:
    """The metrics of one operator process, in a registry of their own (nothing is registered at import)."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    reconcile_seconds: Histogram = field(init=False)
    queue_depth: Gauge = field(init=False)
    queue_age_seconds: Gauge = field(init=False)
    attempts: Counter = field(init=False)
    placements: Counter = field(init=False)
    fence_seconds: Histogram = field(init=False)
    watch_restarts: Counter = field(init=False)
    leader: Gauge = field(init=False)
    unread_seconds: Gauge = field(init=False)
    jobs: JobMetrics = field(default_factory=JobMetrics)
    drills: DrillMetrics = field(default_factory=DrillMetrics)

    def __post_init__(self) -> None:
        r = self.registry
        r.register(self.jobs)
        r.register(self.drills)
        self.reconcile_seconds = _reconcile_seconds(r)
        self.queue_depth = Gauge("rtj_operator_queue_depth", "Jobs that wait for a worker.", registry=r)
        self.queue_age_seconds = Gauge(
            "rtj_operator_queue_age_seconds",
            "Seconds that the oldest due job has waited for a worker.",
            registry=r,
        )
        self.attempts = Counter(
            "rtj_operator_attempts",
            "Attempts started, by the cause that ended the one before.",
            ["cause"],
            registry=r,
        )
        self.placements = Counter(
            "rtj_operator_placements", "Placements (Jobs) created, by cause.", ["cause"], registry=r
        )
        self.fence_seconds = Histogram(
            "rtj_operator_fence_seconds", "Seconds of fence and pick against the store.", registry=r
        )
        self.leader = Gauge("rtj_operator_leader", "1 on the replica that works, else 0.", registry=r)
        self.unread_seconds = Gauge(
            "rtj_operator_unread_seconds",
            "Seconds since all jobs were last read from the API server, about 60 at most while it answers.",
            registry=r,
        )
        self.watch_restarts = Counter(
            "rtj_operator_watch_restarts",
            "Times the watches ended with an error and were started again.",
            registry=r,
        )

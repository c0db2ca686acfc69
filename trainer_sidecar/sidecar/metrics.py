"""Every metric of the sidecar, by its exact name (the reference page lists them from here). Own registry, no globals.

`resume_world_size_change_total` is the operator's: a sidecar does not outlive a change of pods.
"""

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All families of one sidecar."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.save = Histogram(
            "checkpoint_save_duration_seconds",
            "From the start of staging to the commit, per committed save",
            buckets=_SECONDS,
            registry=registry,
        )
        self.staging = Histogram(
            "checkpoint_async_staging_seconds",
            "Copying a rank's state into host memory, the part of a save that blocks training",
            buckets=_SECONDS,
            registry=registry,
        )
        self.bytes = Counter("checkpoint_bytes", "Bytes of shards uploaded by this pod", registry=registry)
        self.commit_lag = Gauge(
            "checkpoint_commit_lag_seconds",
            "Age of the save in flight since it was sealed; with none in flight, that of the last one at its commit",
            registry=registry,
        )
        self.in_progress = Gauge(
            "checkpoint_inprogress_count", "Saves in flight, at most 1", registry=registry
        )
        self.last_step = Gauge(
            "checkpoint_last_committed_step", "Step of the newest commit known", registry=registry
        )
        self.restore = Histogram(
            "checkpoint_restore_duration_seconds",
            "From the opening of a restore point to the last local rank's close",
            buckets=_SECONDS,
            registry=registry,
        )
        self.restore_failures = Counter(
            "checkpoint_restore_failures", "Failed restore requests by reason", ["reason"], registry=registry
        )
        self.checksum_failures = Counter(
            "checkpoint_checksum_failures",
            "Bytes that twice did not have the digest they must have",
            registry=registry,
        )
        self.retired = Counter(
            "checkpoint_retired", "Checkpoints that retention has given up", registry=registry
        )
        self.swept = Counter(
            "checkpoint_swept_objects",
            "Objects deleted of retired and aborted saves and of older epochs",
            registry=registry,
        )
        self.delete_failures = Counter(
            "checkpoint_delete_failures",
            "Rounds of retention or sweeping that did not get through; they are tried again",
            registry=registry,
        )
        self.reprocessed = Counter(
            "checkpoint_reprocessed_samples",
            "Samples run again because a window could not be split",
            registry=registry,
        )
        self.loss_delta = Gauge(
            "resume_loss_delta",
            "Largest relative loss difference over the steps compared after a resume",
            registry=registry,
        )

    def committed(self, step: int, seconds: float, lag: float) -> None:
        """Account for a commit: step, seconds since staging began, seconds since it was sealed."""
        self.save.observe(seconds)
        self.commit_lag.set(lag)
        self.last_step.set(step)

    def text(self) -> bytes:
        """Prometheus text format."""
        return prometheus_client.generate_latest(self.registry)

"""What a placement is made of, built as values: the Indexed Job, its pods, the sidecar beside the trainer.

Nothing is sent from here and nothing that is passed in is changed. The same input gives the same Job.
"""

from rtj_operator.pods.digest import spec_digest
from rtj_operator.pods.job import (
    LEAST_GRACE_SECONDS,
    Placement,
    build_job,
    grace_seconds,
    pod_labels,
    selector,
)
from rtj_operator.pods.settings import PodSettings

__all__ = [
    "LEAST_GRACE_SECONDS",
    "Placement",
    "PodSettings",
    "build_job",
    "grace_seconds",
    "pod_labels",
    "selector",
    "spec_digest",
]

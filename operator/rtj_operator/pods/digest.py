"""Digest of everything in a spec that pods are built from: another digest asks for a new placement.

The operator's own settings are not in it: an upgrade of the operator must not move a running trainer.
"""

import hashlib
import json

from rtj_operator.api import ResumableTrainingJob


def spec_digest(job: ResumableTrainingJob) -> str:
    """16 hex digits over template, staging, store, status port, queue and start-up time-out."""
    spec = job.spec
    store = spec.checkpoint.store
    parts: list[object] = [
        spec.template,
        spec.checkpoint.staging.to_dict(),
        [store.url, store.endpoint, store.region, store.credentials_secret],
        spec.checkpoint.run_id,
        spec.status_port,
        spec.scheduling.queue,
        spec.restart.startup_timeout_seconds,
    ]
    if spec.scheduling.priority_class is not None:  # jobs without one keep their digest
        parts.append(spec.scheduling.priority_class)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

"""What the reader of a drill (deep: false) says when it ends, as its pod's termination message: bounded, and hostile to
whoever reads it, like any text from a pod.
"""

from pydantic import Field

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.restore_fault import RestoreFault

ENV_CHECKPOINT = "RTJ_CHECKPOINT"
"""Checkpoint that the reader reads, of the run that the sidecar's own variables name."""
TERMINATION_LOG = "/dev/termination-log"
MAX_RESULT_BYTES = 4096
"""What Kubernetes keeps of a termination message."""


class ReadResult(Document):
    """All bytes of a checkpoint were read: proven, or the first thing that is wrong with it, seen twice."""

    checkpoint_id: str
    bytes: int = Field(default=0, ge=0)
    """Bytes of shards and frozen objects that were proven."""
    seconds: float = Field(default=0.0, ge=0)
    fault: RestoreFault | None = None

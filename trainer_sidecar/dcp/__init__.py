"""`dcp.save`, `dcp.async_save` and `dcp.load` over the sidecar: the same files and the same commit as a `Session`'s.

For scripts that call torch.distributed.checkpoint themselves and shall go on doing so. A `Session` saves without any
collective and restores, checks and orders far more than tensors (docs/migrate.md).
"""

from trainer_sidecar.dcp.errors import CheckpointRefused, RestorePointNotLoaded, SaveInFlight
from trainer_sidecar.dcp.reader import SidecarReader
from trainer_sidecar.dcp.writer import SidecarWriter

__all__ = ["CheckpointRefused", "RestorePointNotLoaded", "SaveInFlight", "SidecarReader", "SidecarWriter"]

"""The compatibility matrix as a run's journal leaves it: blocked transitions that a drill has passed are open.

Read anew at each fence, so that nobody has to keep it: a drill opens a transition for the fingerprints that it ran
with, and a restore point with others finds it closed again.
"""

from collections.abc import Mapping

from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.api.policies import CompatibilityStatus
from rtj_operator.api.spec import CompatibilityEntry
from rtj_operator.mesh import with_proven
from trainer_sidecar.contract.checkpoint import fingerprints_digest
from trainer_sidecar.contract.journal import RestorePoint, Verified
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.store.drills import proven_transitions
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.verify import read_manifest

Proven = Mapping[tuple[Mesh, Mesh], Verified]
"""(mesh that saved, mesh that resumed) -> the drill's entry."""


def open_matrix(
    spec: EffectiveSpec, journal: Journal, keys: RunKeys, point: RestorePoint
) -> tuple[CompatibilityEntry, ...]:
    """The job's matrix for resuming `point`, which the run of `keys` holds. `journal`, the job's own, has been read.

    Raises StoreError, BadCheckpointError.
    """
    if not any(entry.status is CompatibilityStatus.BLOCKED for entry in spec.matrix):
        return spec.matrix
    return with_proven(spec.matrix, proven(spec, journal, keys, point))


def proven(spec: EffectiveSpec, journal: Journal, keys: RunKeys, point: RestorePoint) -> Proven:
    """What drills have proven for the fingerprints of `point`; nothing once the spec declares others. Raises as
    `open_matrix`."""
    saved = read_manifest(journal.store, keys, point).fingerprints
    if any(saved.get(name) != value for name, value in spec.fingerprints.declared.items()):
        return {}
    return proven_transitions(journal.history, fingerprints_digest(saved))

"""A second opinion on an accused checkpoint: its named object is read again, by somebody else than the accuser (R24).

An accusation reaches the operator as text that the trainer's container can write, and a machine with bad memory or a
bug in the library finds every checkpoint bad. So only what this read finds wrong as well, with digests from the journal
down, may lead to a quarantine. It reads the object that the accusation names and what proves that, nothing else.
"""

import math
import re
from dataclasses import dataclass

from trainer_sidecar.contract.checkpoint import Index, ManifestFile, Witness
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import OnVerificationFailure, VerificationPolicy
from trainer_sidecar.contract.restore_fault import RestoreFault
from trainer_sidecar.store.base import NotFoundError, Store
from trainer_sidecar.store.deep import (
    HashedFile,
    Piece,
    files_of,
    look_document,
    look_piece,
    read_leaves,
)
from trainer_sidecar.store.verify import (
    BadCheckpointError,
    Expected,
    Problem,
    bad_checkpoint,
    look_object,
    objects_of,
    read_manifest,
    seen_twice,
)

MOST_BYTES = 16 * 1024 * 1024
"""Read again at most: more than one read of a sidecar."""
_LEAF = re.compile(r" in leaf (\d{1,12})\b")
_RANGE = re.compile(r"^(\d{1,15}) bytes at (\d{1,15})$")


def confirmed(
    store: Store, keys: RunKeys, point: RestorePoint, fault: RestoreFault, tolerance: float | None = None
) -> RestoreFault | None:
    """The accusation as this read bears it out, with what was found now; None when the object is as it should be.

    `keys` are those of the run that holds `point`. `tolerance`: largest relative difference of a loss from the witness;
    None: state accuses nobody. The caller has read the journal just before, so that what retention
    has deleted accuses nobody. Raises StoreError, which judges nothing, and FormatTooNewError.
    """
    try:
        manifest = read_manifest(store, keys, point)
    except BadCheckpointError as exc:
        return _with(fault, exc)
    if fault.fault == "state":
        return fault if tolerance is not None and _differs(store, keys, manifest, fault, tolerance) else None
    problem = _look(_Accused(store, keys, manifest), fault)
    return _with(fault, bad_checkpoint(keys, point.checkpoint_id, problem)) if problem is not None else None


def state_tolerance(policy: VerificationPolicy) -> float | None:
    """The tolerance under which a state may be accused; None where the policy only warns."""
    return policy.loss_tolerance if policy.on_failure is OnVerificationFailure.FALL_BACK else None


def _with(fault: RestoreFault, found: BadCheckpointError) -> RestoreFault:
    return fault.model_copy(
        update={
            "fault": found.fault,
            "file": found.file[:512],
            "expected": found.expected,
            "found": found.found,
            "reason": f"{fault.reason}; read again: {found.file}: found {found.found}"[:1000],
        }
    )


def _differs(
    store: Store, keys: RunKeys, manifest: ManifestFile, fault: RestoreFault, tolerance: float
) -> bool:
    """Whether the witness, written by the epoch that saved (R22), says of that step what the accuser says it does, and
    the loss that was found is further from it than the tolerance. What was found is the accuser's word."""
    try:
        witness = Witness.model_validate_json(store.get(keys.witness(manifest.checkpoint_id)))
        expected, found = float(fault.expected), float(fault.found)
    except (NotFoundError, ValueError):
        return False
    seen = next((s.loss for s in witness.steps if s.step == fault.step), None)
    if witness.epoch != manifest.epoch or witness.checkpoint_id != manifest.checkpoint_id or seen != expected:
        return False
    return math.isfinite(expected) and not abs(found - expected) <= tolerance * max(abs(expected), 1e-12)


@dataclass(frozen=True)
class _Accused:
    """A checkpoint whose manifest is proven."""

    store: Store
    keys: RunKeys
    manifest: ManifestFile


def _look(at: _Accused, fault: RestoreFault) -> Problem | None:
    """What is wrong with the named object. A name that the manifest does not know accuses nothing."""
    name = fault.file.removeprefix(at.keys.prefix)
    if not name:
        return _look_index(at)
    folder = at.keys.checkpoint(at.manifest.checkpoint_id)
    found = next(
        (f for f in files_of(at.keys, at.manifest) if f.key in (folder + name, at.keys.prefix + name)), None
    )
    if found is not None:
        whole = next(e for e in objects_of(at.keys, at.manifest) if e.key == found.key)
        return _look_hashed(at.store, found, whole, fault)
    document = _documents(at).get(folder + name) or _documents(at).get(at.keys.prefix + name)
    if document is None:
        return None
    key, ref = document
    return seen_twice(lambda: look_document(at.store, key, ref))


def _documents(at: _Accused) -> dict[str, tuple[str, ObjectRef]]:
    """Objects that size and digest prove: index, parts and leaf files."""
    keys, manifest = at.keys, at.manifest
    checkpoint = manifest.checkpoint_id
    found = [(keys.index(checkpoint), manifest.index)]
    found += [(keys.part(checkpoint, s.rank), s.part) for s in manifest.shards]
    found += [(f.leaves_key, f.hashed.leaves) for f in files_of(keys, manifest)]
    return {key: (key, ref) for key, ref in found}


def _look_index(at: _Accused) -> Problem | None:
    """No object is named: the index, and whether it names what the manifest does not."""
    key, ref = at.keys.index(at.manifest.checkpoint_id), at.manifest.index
    problem = seen_twice(lambda: look_document(at.store, key, ref))
    if problem is not None:
        return problem
    known = {s.name for s in at.manifest.shards} | {f.name for f in at.manifest.frozen}
    try:
        strange = [name for name in Index.model_validate_json(at.store.get(key)).files if name not in known]
    except ValueError:
        return None  # proven, and not readable by this version: no damage
    return Problem("bytes", key, "files of the manifest", f"file {strange[0]!r}") if strange else None


def _look_hashed(store: Store, file: HashedFile, whole: Expected, fault: RestoreFault) -> Problem | None:
    """Presence, size and the store's own checksum first, by which a fence accuses; then the leaf file, its root, and
    the leaves that the accusation names."""
    problem = seen_twice(lambda: look_object(store, whole))
    if problem is not None or fault.fault == "missing":
        return problem
    leaves = read_leaves(store, file)
    if isinstance(leaves, Problem):
        return leaves
    piece = _named(file, leaves, fault.expected)
    return seen_twice(lambda: look_piece(store, piece)) if piece is not None else None


def _named(file: HashedFile, leaves: bytes, expected: str) -> Piece | None:
    """The leaves that the accusation names, inside the file; None when it names none."""
    leaf, span, size = _LEAF.search(expected), _RANGE.match(expected), file.hashed.bytes_per_leaf
    if leaf is not None:
        first, count = int(leaf[1]), 1
    elif span is not None:
        first = int(span[2]) // size
        count = min(max(1, MOST_BYTES // size), (int(span[2]) + int(span[1]) - 1) // size - first + 1)
    else:
        return None
    piece = file.piece(leaves[first * 32 : (first + count) * 32], first, count)
    return piece if piece.length > 0 else None

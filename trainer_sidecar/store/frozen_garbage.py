"""Frozen weights that no checkpoint needs any more (design 2, datapath T8). They belong to no epoch, so no sweep may
take them: a running attempt refers to an object long before a manifest names it. Only while no attempt runs can they be
judged, and whoever calls `delete_unused` vouches for that; a coordinator never calls it.

No clock decides anything (R13). When in doubt about one checkpoint's references, everything stays.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, StoreError
from trainer_sidecar.store.fan_out import fan_out
from trainer_sidecar.store.history import History, restore_point
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.retention import doom, present_checkpoints
from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError, read_manifest

_NAME = re.compile(r"^([0-9a-f]{64})(\.hash)?$")
_BATCH = 1000


class FrozenInDoubtError(StoreError):
    """What a checkpoint refers to cannot be read, or an attempt has begun meanwhile: nothing (more) is deleted."""

    reason = "FrozenInDoubt"


@dataclass(frozen=True)
class FrozenGarbage:
    """A frozen object that nothing names, with its leaf file; either may be all that is left."""

    sha256: str
    keys: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        """As manifests name it."""
        return f"frozen/{self.sha256}"


def unused_frozen(journal: Journal, *, retiring: Collection[str] = ()) -> list[FrozenGarbage]:
    """Frozen objects that no unretired manifest names, in name order; changes nothing.

    Reads the journal first. Manifests under quarantine count, retired ones only while held, and saves that could still
    commit (a claim in flight survives its writer, R3) as well. `retiring`: ids to take for retired, for a dry run.
    Raises FrozenInDoubtError when one of these cannot be read, StoreError, and as `Journal.check_writable`.
    """
    history = journal.read()
    journal.check_writable(history)
    found = _found(journal)
    if not found:
        return []
    named = _named(journal, history, set(retiring))
    return [garbage for garbage in found if garbage.sha256 not in named]


def delete_unused(journal: Journal, *, epoch: int | None = None) -> list[FrozenGarbage]:
    """Delete what `unused_frozen` finds; what is gone. The caller vouches that no attempt runs or begins: none after
    that of `epoch`, else none after the newest one that is read first.

    The journal is read again before each batch: raises FrozenInDoubtError when an attempt stands there that had not
    stood before. A broken-off deletion is continued by the next call. Raises as `unused_frozen`.
    """
    garbage = unused_frozen(journal)
    epoch = journal.history.epoch if epoch is None else epoch
    keys = [key for item in garbage for key in item.keys]
    for start in range(0, len(keys), _BATCH):
        _require_no_new_attempt(journal, epoch)
        journal.store.delete(keys[start : start + _BATCH])
    _require_no_new_attempt(journal, epoch)
    journal.store.discard_unfinished(journal.keys.frozen_prefix, lambda _key: True)
    return garbage


def _require_no_new_attempt(journal: Journal, epoch: int) -> None:
    newest = journal.refresh().newest
    if newest is not None and newest.seq != epoch:
        raise FrozenInDoubtError(
            f"attempt {newest.attempt} (epoch {newest.seq}) of {journal.keys.prefix} has begun while frozen weights "
            "were deleted: suspend or finish the job and run this again; what that attempt saves is checked when it is "
            "restored",
            store=journal.store.url,
        )


def _found(journal: Journal) -> list[FrozenGarbage]:
    """Every frozen object there is. Names of another form are not ours and stay."""
    by_digest: dict[str, list[tuple[str, int]]] = {}
    for item in journal.store.list(journal.keys.frozen_prefix):
        match = _NAME.match(item.key.removeprefix(journal.keys.frozen_prefix))
        if match:
            by_digest.setdefault(match[1], []).append((item.key, item.size))
    return [
        FrozenGarbage(sha256, tuple(key for key, _ in items), sum(size for _, size in items))
        for sha256, items in sorted(by_digest.items())
    ]


def _named(journal: Journal, history: History, retiring: set[str]) -> set[str]:
    """Digests that may be needed: of commits, and of saves that could still become commits."""
    committed = [i for i in history.manifests if _stays(history, i, retiring)]
    in_flight = [
        i
        for i in present_checkpoints(journal)
        if i not in history.manifests and not doom(history, i, history.epoch)
    ]

    def read(checkpoint_id: str) -> set[str]:
        if checkpoint_id in history.manifests:
            return _of_commit(journal, history, checkpoint_id)
        return _of_save(journal, checkpoint_id)

    return {sha256 for found in fan_out(read, committed + in_flight, journal.parallel) for sha256 in found}


def _stays(history: History, checkpoint_id: str, retiring: set[str]) -> bool:
    if checkpoint_id in history.holds:
        return True
    return checkpoint_id not in history.retired and checkpoint_id not in retiring


def _of_commit(journal: Journal, history: History, checkpoint_id: str) -> set[str]:
    point = restore_point(history.manifests[checkpoint_id])
    try:
        return set(_digests(read_manifest(journal.store, journal.keys, point)))
    except BadCheckpointError as exc:
        if checkpoint_id in history.retired and exc.fault == "missing":
            return set()  # deleted before somebody held it
        raise _doubt(journal, checkpoint_id, str(exc)) from exc
    except FormatTooNewError as exc:
        raise _doubt(journal, checkpoint_id, str(exc)) from exc


def _of_save(journal: Journal, checkpoint_id: str) -> set[str]:
    """References of a save without a commit. Before its manifest is written no claim can be in flight."""
    try:
        key = journal.keys.manifest(checkpoint_id)
    except ValueError:
        return set()  # not a checkpoint's name: nothing of it can be committed
    try:
        return set(_digests(ManifestFile.model_validate_json(journal.store.get(key))))
    except NotFoundError:
        return set()
    except ValidationError as exc:
        raise _doubt(journal, checkpoint_id, str(exc)) from exc


def _digests(manifest: ManifestFile) -> Iterator[str]:
    return (f.sha256 for f in manifest.frozen)


def _doubt(journal: Journal, checkpoint_id: str, why: str) -> FrozenInDoubtError:
    keys: RunKeys = journal.keys
    return FrozenInDoubtError(
        f"no frozen weights of {keys.prefix} are deleted while it is unknown which ones checkpoint {checkpoint_id} "
        f"needs: {why}; repair its manifest.json, or let retention retire it",
        store=journal.store.url,
        key=keys.manifest(checkpoint_id),
    )

"""Fence and pick: one conditional append both shuts out older attempts and names the restore point (protocol B, R20).

The operator and `rtj run` start every attempt through here. Nothing starts from scratch unless the journal, contiguous
from its first entry, holds no commit and the caller knows of none (R11).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import uuid4

from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.journal import Attempt, Cause, Entry, Owner, Quarantined, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalLostError
from trainer_sidecar.store.verify import BadCheckpointError, read_manifest, verify_ingest

__all__ = [
    "FenceError",
    "FenceRequest",
    "Fenced",
    "JournalLostError",
    "NothingRestorableError",
    "RunExistsError",
    "RunTakenOverError",
    "SupersededError",
    "fence_and_pick",
]

PlanFor = Callable[[RestorePoint | None, Topology | None], Topology]
"""(restore point, its saved topology) -> topology of the attempt. Its refusals pass through."""


class FenceError(Exception):
    """An attempt may not start. The message says why and what to do."""

    reason = "FenceRefused"


class RunTakenOverError(FenceError):
    """This run was ours and another owner has fenced it since (R8)."""

    reason = "RunTakenOver"


class RunExistsError(FenceError):
    """The run belongs to another owner and the spec does not adopt it (R8)."""

    reason = "RunExists"


class SupersededError(FenceError):
    """This attempt stands in the journal and a later one has fenced it already."""

    reason = "Superseded"


class NothingRestorableError(FenceError):
    """Commits exist and none can be restored (R11, R24). Never a start from scratch."""

    reason = "NothingRestorable"


@dataclass(frozen=True)
class FenceRequest:
    """What a new attempt asks for."""

    owner: Owner
    attempt_nonce: str
    cause: Cause
    writer: str
    plan_for: PlanFor
    known_attempts: int = 0
    """Attempts that the caller has seen fenced before (epochs it has published), not the one it intends now."""
    known_commits: bool = False
    """Whether the caller has ever seen a commit of this run."""
    adopt: bool = False


@dataclass(frozen=True)
class Fenced:
    """A fenced attempt. `restore` None means that it starts from scratch, which R11 has allowed."""

    attempt: int
    epoch: int
    restore: RestorePoint | None
    topology: Topology
    saved_topology: Topology | None
    entry: Attempt
    manifest: ManifestFile | None = field(default=None, repr=False)
    quarantined: tuple[str, ...] = ()
    """Sentences about checkpoints that were found bad on the way."""
    reused: bool = False
    """The journal already held this attempt (R9)."""


def fence_and_pick(journal: Journal, request: FenceRequest, *, timeout: float | None = None) -> Fenced:
    """Append this attempt's `Attempt`, or find it. Raises the errors above, StoreError, and what `plan_for` raises."""
    history = journal.read()
    journal.check_writable(history)
    bad: list[str] = []
    while True:
        own = history.attempt_with(request.attempt_nonce)
        if own is not None:
            _check_owner(history, request, journal)
            return _reuse(journal, history, own, tuple(bad))
        pick = _pick(history, request, journal)
        manifest: ManifestFile | None = None
        if pick is not None:
            try:
                manifest = verify_ingest(journal.store, _keys(journal, pick), pick, parallel=journal.parallel)
            except BadCheckpointError as exc:
                bad.append(str(exc))
                _quarantine(journal, request, pick, exc, timeout)
                history = journal.history
                continue
        saved = manifest.topology if manifest else None
        topology = request.plan_for(pick, saved)
        entry = _append(journal, request, pick, topology, timeout)
        if isinstance(entry, Attempt):
            return Fenced(
                entry.attempt, entry.seq, entry.restore, entry.topology, saved, entry, manifest, tuple(bad)
            )
        history = journal.history


def _pick(history: History, request: FenceRequest, journal: Journal) -> RestorePoint | None:
    """The restore point for the next attempt, after everything that forbids one."""
    _check_owner(history, request, journal)
    _check_not_lost(history, request, journal)
    pick = history.newest_restorable
    if pick is None and (history.manifests or history.fork_point is not None):
        raise NothingRestorableError(
            f"run {journal.keys.prefix} in {journal.store.url} has {len(history.manifests)} commits and none can be "
            f"restored: {_why_none(history)}. Repair or reinstate one (rtj checkpoints reinstate); "
            "it does not start from scratch"
        )
    return pick


def _check_owner(history: History, request: FenceRequest, journal: Journal) -> None:
    owner = history.owner
    if owner is None or owner.uid == request.owner.uid:
        return
    other = f"{owner.cluster or 'local'}/{owner.namespace}/{owner.name} (uid {owner.uid})"
    if any(a.owner.uid == request.owner.uid for a in history.attempts):
        raise RunTakenOverError(
            f"run {journal.keys.prefix} in {journal.store.url} was taken over by {other} at entry {history.epoch}: "
            "this object is finished with it; create a new one with checkpoint.adopt to take it back"
        )
    if not request.adopt:
        raise RunExistsError(
            f"run {journal.keys.prefix} in {journal.store.url} belongs to {other}: choose another checkpoint.runId, or "
            "set checkpoint.adopt: true to take it over"
        )


def _check_not_lost(history: History, request: FenceRequest, journal: Journal) -> None:
    journal.check_writable(history)
    seen = max((a.attempt for a in history.attempts), default=0)
    missing = ""
    if request.known_attempts > seen:
        missing = f"{request.known_attempts} attempts were fenced, the journal knows {seen}"
    elif request.known_commits and not history.manifests:
        missing = "commits were seen, the journal knows none"
    if missing:
        raise JournalLostError(
            f"run {journal.keys.prefix} in {journal.store.url}: {missing}. Wrong bucket, prefix or credentials, or the "
            "journal was deleted: correct the store's settings or restore it; it does not start from scratch"
        )


def _why_none(history: History) -> str:
    reasons = [f"{i} is quarantined ({q.fault}: {q.reason})" for i, q in history.quarantined.items()]
    reasons += [f"{i} is retired" for i in history.retired if i not in history.quarantined]
    return "; ".join(reasons[-5:]) or "none is on the lineage of the newest attempt"


def _append(
    journal: Journal,
    request: FenceRequest,
    pick: RestorePoint | None,
    topology: Topology,
    timeout: float | None,
) -> Entry | None:
    def decide(history: History) -> Entry | None:
        if history.attempt_with(request.attempt_nonce) is not None:
            return None
        if _pick(history, request, journal) != pick:
            return None  # a last commit slipped in, or a verdict: pick again, from the newer one
        return Attempt(
            seq=history.next_seq,
            epoch=history.next_seq,
            owner=request.owner,
            writer=request.writer,
            nonce=request.attempt_nonce,
            time=time.time(),
            attempt=history.next_attempt,
            cause=request.cause,
            topology=topology,
            restore=pick,
        )

    return journal.append(decide, timeout=timeout)


def _quarantine(
    journal: Journal,
    request: FenceRequest,
    pick: RestorePoint,
    bad: BadCheckpointError,
    timeout: float | None,
) -> None:
    def decide(history: History) -> Entry | None:
        _check_owner(history, request, journal)
        if history.newest_restorable != pick:
            return None  # retired or quarantined meanwhile: the verdict is dropped (R21, R24)
        return Quarantined(
            seq=history.next_seq,
            epoch=history.epoch,
            owner=request.owner,
            writer=request.writer,
            nonce=uuid4().hex,
            time=time.time(),
            checkpoint_ids=[pick.checkpoint_id],
            fault=bad.fault,
            reason=str(bad)[:1000],
            file=bad.file,
            detail={"expected": bad.expected, "found": bad.found, "reads": 2},
        )

    journal.append(decide, timeout=timeout)


def _reuse(journal: Journal, history: History, own: Attempt, bad: tuple[str, ...]) -> Fenced:
    """R9: this attempt stands in the journal already; its entry says everything."""
    if own.seq != history.epoch:
        raise SupersededError(
            f"attempt {own.attempt} (entry {own.seq}) of run {journal.keys.prefix} was fenced by entry "
            f"{history.epoch}: "
            "start another attempt with a nonce of its own"
        )
    manifest = read_manifest(journal.store, _keys(journal, own.restore), own.restore) if own.restore else None
    saved = manifest.topology if manifest else None
    return Fenced(own.attempt, own.seq, own.restore, own.topology, saved, own, manifest, bad, reused=True)


def _keys(journal: Journal, point: RestorePoint) -> RunKeys:
    return RunKeys(point.source.namespace, point.source.run_id) if point.source else journal.keys

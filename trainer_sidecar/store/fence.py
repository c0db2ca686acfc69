"""Fence and pick: one conditional append both shuts out older attempts and names the restore point (protocol B, R20).

The operator and `rtj run` start every attempt through here. Nothing starts from scratch unless the journal, contiguous
from its first entry, holds no commit and the caller knows of none (R11).
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import uuid4

from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.journal import Attempt, Cause, Entry, Owner, Quarantined, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.restore_fault import trains_otherwise
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.store.base import NotFoundError
from trainer_sidecar.store.fence_errors import (
    FenceError,
    ForkSourceError,
    NothingRestorableError,
    RunExistsError,
    RunTakenOverError,
    SupersededError,
)
from trainer_sidecar.store.forks import (
    Fork,
    choose_source,
    hold,
    holder_name,
    source_journal,
)
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalLostError
from trainer_sidecar.store.quarantine import why_not
from trainer_sidecar.store.removal import used_up
from trainer_sidecar.store.retention import present_checkpoints
from trainer_sidecar.store.verify import BadCheckpointError, read_manifest, verify_ingest

__all__ = [
    "FenceError",
    "FenceRequest",
    "Fenced",
    "Fork",
    "ForkSourceError",
    "JournalLostError",
    "NothingRestorableError",
    "RunExistsError",
    "RunTakenOverError",
    "SupersededError",
    "fence_and_pick",
]

PlanFor = Callable[[RestorePoint | None, Topology | None], Topology]
"""(restore point, its saved topology) -> topology of the attempt. Its refusals pass through."""


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
    fork: Fork | None = None
    """Where a run without attempts starts from; ignored once it has one."""


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


def fence_and_pick(
    journal: Journal,
    request: FenceRequest,
    *,
    timeout: float | None = None,
    stop: threading.Event | None = None,
) -> Fenced:
    """Append this attempt's `Attempt`, or find it. `timeout` (seconds) bounds, and `stop` ends, each append's retries.

    Raises the errors above, StoreError (AppendUndecidedError: call again with the same nonce, R9), and what `plan_for`
    raises.
    """
    return _Fencing(journal, request, timeout, stop).run()


class _Fencing:
    """One call of `fence_and_pick`: pick, look, plan, append; again from the top whenever the journal has moved."""

    def __init__(
        self, journal: Journal, request: FenceRequest, timeout: float | None, stop: threading.Event | None
    ) -> None:
        self._journal, self._request, self._timeout, self._stop = journal, request, timeout, stop
        self._source: Journal | None = None
        self._bad: list[str] = []

    def run(self) -> Fenced:
        history = self._journal.read()
        self._journal.check_writable(history)
        while True:
            own = history.attempt_with(self._request.attempt_nonce)
            fenced = self._try(history) if own is None else self._reuse(history, own)
            if fenced is not None:
                return fenced
            history = self._journal.history

    def _try(self, history: History) -> Fenced | None:
        """One pass; None when the journal has moved on and everything is decided again."""
        request, journal = self._request, self._journal
        pick = self._pick(history)
        manifest: ManifestFile | None = None
        if pick is not None:
            try:
                manifest = verify_ingest(journal.store, _keys(journal, pick), pick, parallel=journal.parallel)
            except BadCheckpointError as exc:
                self._bad.append(str(exc))
                self._quarantine(pick, exc)
                return None
        saved = manifest.trained_on if manifest else None
        topology = request.plan_for(pick, saved)
        if self._source is not None and pick is not None:
            self._hold(self._source, pick)
        entry = self._append(pick, topology)
        if not isinstance(entry, Attempt):
            return None
        return Fenced(
            attempt=entry.attempt,
            epoch=entry.seq,
            restore=entry.restore,
            topology=entry.topology,
            saved_topology=saved,
            entry=entry,
            manifest=manifest,
            quarantined=tuple(self._bad),
        )

    def _pick(self, history: History) -> RestorePoint | None:
        """The restore point for the next attempt, after everything that forbids one."""
        _check_owner(history, self._request, self._journal)
        _check_not_lost(history, self._request, self._journal)
        if self._request.fork is not None and not history.attempts:
            if self._source is None:
                self._source = source_journal(self._journal, self._request.fork)
                self._source.read()
            return choose_source(self._source.history, self._request.fork, history)
        self._source = None
        pick = history.newest_restorable
        if pick is None and (history.manifests or history.fork_point is not None):
            raise _nothing_restorable(history, self._journal)
        if pick is None and history.void:
            _check_no_commit_is_lost(history, self._journal)
        return pick

    def _append(self, pick: RestorePoint | None, topology: Topology) -> Entry | None:
        request = self._request

        def decide(history: History) -> Entry | None:
            if history.attempt_with(request.attempt_nonce) is not None:
                return None
            if self._pick(history) != pick:
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

        return self._journal.append(decide, timeout=self._timeout, stop=self._stop)

    def _quarantine(self, pick: RestorePoint, bad: BadCheckpointError) -> None:
        """In the own journal, also for a fork's source (R15)."""
        request = self._request

        def decide(history: History) -> Entry | None:
            if self._pick(history) != pick:
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

        self._journal.append(decide, timeout=self._timeout, stop=self._stop)

    def _hold(self, source: Journal, pick: RestorePoint) -> None:
        """R15: before the fork's own `Attempt`, so that retention at the source cannot take it away."""
        request = self._request
        hold(
            source,
            pick.checkpoint_id,
            holder_name(self._journal.keys),
            owner=request.owner,
            writer=request.writer,
            timeout=self._timeout,
        )

    def _reuse(self, history: History, own: Attempt) -> Fenced:
        """R9: this attempt stands in the journal already; its entry says everything."""
        journal = self._journal
        _check_owner(history, self._request, journal)
        if own.seq != history.epoch:
            raise SupersededError(
                f"attempt {own.attempt} (entry {own.seq}) of run {journal.keys.prefix} was fenced by entry "
                f"{history.epoch}: start another attempt with a nonce of its own"
            )
        point = own.restore
        manifest = None
        if point is not None:
            # Gone bad since: the ranks find that, as of any restore point, and the next fence judges it (R24).
            with suppress(BadCheckpointError):
                manifest = read_manifest(journal.store, _keys(journal, point), point)
        return Fenced(
            attempt=own.attempt,
            epoch=own.seq,
            restore=point,
            topology=own.topology,
            saved_topology=manifest.trained_on if manifest else None,
            entry=own,
            manifest=manifest,
            quarantined=tuple(self._bad),
            reused=True,
        )


def _nothing_restorable(history: History, journal: Journal) -> NothingRestorableError:
    bad = history.quarantined
    what = "Repair or reinstate one (rtj checkpoints reinstate)"
    if bad and all(q.fault == "state" for q in bad.values()):
        own = [i for i, q in bad.items() if i in q.checkpoint_ids][-5:]
        what = f"All were quarantined for their state: {trains_otherwise(own)}"
    return NothingRestorableError(
        f"run {journal.keys.prefix} in {journal.store.url} has {len(history.manifests)} commits and none can be "
        f"restored: {_why_none(history)}. {what}; it does not start from scratch",
        in_doubt=bool(history.void),
    )


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
    removed = used_up(journal, history)
    if removed:
        raise RunExistsError(removed)
    if not request.adopt:
        raise RunExistsError(
            f"run {journal.keys.prefix} in {journal.store.url} belongs to {other}: set checkpoint.adopt: true to take "
            "it over, or make a new job with another checkpoint.runId, which cannot change"
        )


def _check_not_lost(history: History, request: FenceRequest, journal: Journal) -> None:
    journal.check_writable(history)
    seen = max((a.attempt for a in history.attempts), default=0)
    missing = ""
    if request.known_attempts > seen:
        missing = f"{request.known_attempts} attempts were fenced, the journal knows {seen}"
    elif request.known_commits and not history.manifests and history.fork_point is None:
        missing = "commits were seen, the journal knows none"
    if missing:
        raise JournalLostError(
            f"run {journal.keys.prefix} in {journal.store.url}: {missing}. Wrong bucket, prefix or credentials, or the "
            "journal was deleted: correct the store's settings or restore it; it does not start from scratch"
        )


def _check_no_commit_is_lost(history: History, journal: Journal) -> None:
    """Nothing is committed as far as can be read, but an unreadable slot may have been a commit (R11)."""
    for checkpoint_id in present_checkpoints(journal):
        if checkpoint_id in history.aborted or checkpoint_id in history.retired:
            continue
        try:
            journal.store.head(journal.keys.manifest(checkpoint_id))
        except NotFoundError:
            continue
        slots = ", ".join(journal.keys.journal(seq) for seq in history.void)
        raise JournalLostError(
            f"{journal.store.url}: {slots} cannot be read, and may have been the commit of {checkpoint_id}, whose "
            "manifest is there: restore the object from a version or a backup, or begin another run; it does not start "
            "from scratch"
        )


def _why_none(history: History) -> str:
    reasons = [f"{i} is quarantined ({q.fault}: {q.reason})" for i, q in history.quarantined.items()]
    reasons += [f"{i} {why_not(history, i)}" for i in history.doubted if i not in history.quarantined]
    reasons += [f"{i} is retired" for i in history.retired if i not in history.quarantined]
    return "; ".join(reasons[-5:]) or "none is on the lineage of the newest attempt"


def _keys(journal: Journal, point: RestorePoint) -> RunKeys:
    return RunKeys(point.source.namespace, point.source.run_id) if point.source else journal.keys

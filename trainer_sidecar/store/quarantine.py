"""Verdicts on checkpoints: quarantining one, taking that back, recording that one was verified (protocol E).

The operator and `rtj run` accuse what a restore found bad; `rtj checkpoints` acts for a person. All of them append as
the operator does: read to the tail, decide again on refusal (R4, R5).
"""

from contextlib import suppress
from typing import Any, Literal

from trainer_sidecar.contract.journal import Entry, Owner, Quarantined, Reinstated, Verified
from trainer_sidecar.contract.restore_fault import RestoreFault
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalError, entry_head


class VerdictRefusedError(ValueError):
    """The verdict does not apply to what the journal says of the checkpoint."""


def accuse(
    journal: Journal, fault: RestoreFault, *, owner: Owner, writer: str, timeout: float | None = None
) -> Quarantined | None:
    """Append `Quarantined` for what a restore found bad; None when the verdict is dropped (R21).

    It is dropped for checkpoints that are retired, quarantined already, or unknown here: the journal is read first, so
    that a 404 of a retired one accuses nobody (R24). Raises as `Journal.append`.
    """

    def decide(history: History) -> Entry | None:
        if not history.restorable(fault.checkpoint_id):
            return None
        detail = {"expected": fault.expected[:256], "found": fault.found[:256], "reads": fault.reads}
        return _quarantined(
            history,
            [fault.checkpoint_id],
            fault.fault,
            fault.reason,
            owner=owner,
            writer=writer,
            file=fault.file,
            covers_descendants=fault.fault == "state",
            detail=detail,
        )

    entry = journal.append(decide, timeout=timeout)
    return entry if isinstance(entry, Quarantined) else None


def quarantine(
    journal: Journal,
    checkpoint_id: str,
    fault: Literal["missing", "bytes", "state"],
    reason: str,
    *,
    owner: Owner,
    writer: str,
    file: str = "",
    covers_descendants: bool = False,
    detail: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Quarantined:
    """A person's, or a deep verification's, verdict. Raises VerdictRefusedError when it is not restorable anyway.

    One that covers descendants is written twice: the run may train on and commit some, and those are in no doubt when
    the one entry that covers them is damaged.
    """

    def decide(history: History) -> Entry | None:
        if not history.restorable(checkpoint_id) and checkpoint_id not in history.doubted:
            raise VerdictRefusedError(f"checkpoint {checkpoint_id} {why_not(history, checkpoint_id)}")
        return _quarantined(
            history,
            [checkpoint_id],
            fault,
            reason,
            owner=owner,
            writer=writer,
            file=file,
            covers_descendants=covers_descendants,
            detail=detail or {},
        )

    entry = journal.append(decide, timeout=timeout)
    assert isinstance(entry, Quarantined)
    if covers_descendants and fault == "state":
        with suppress(StoreError, JournalError):  # the verdict stands already
            _say_again(journal, entry, timeout)
    return entry


def _say_again(journal: Journal, first: Quarantined, timeout: float | None) -> None:
    """The verdict in a second slot, unless it was taken back meanwhile."""

    def decide(history: History) -> Entry | None:
        if any(history.quarantined.get(i) != first for i in first.checkpoint_ids):
            return None
        head = entry_head(history, first.owner, first.writer)
        return first.model_copy(update={**head, "detail": {**first.detail, "repeats": first.seq}})

    journal.append(decide, timeout=timeout)


def reinstate(
    journal: Journal,
    checkpoint_id: str,
    *,
    by: str,
    reason: str,
    owner: Owner,
    writer: str,
    timeout: float | None = None,
) -> Reinstated:
    """Take a quarantine back; `by` is the person who answers for it (R24).

    Also takes it out of the doubt that an unreadable entry has cast on it. Raises VerdictRefusedError when the
    checkpoint is in no doubt and has no quarantine of its own.
    """

    def decide(history: History) -> Entry | None:
        standing = history.quarantined.get(checkpoint_id)
        if standing is None and checkpoint_id in history.doubted:
            return Reinstated(
                **entry_head(history, owner, writer), checkpoint_id=checkpoint_id, by=by, reason=reason
            )
        if standing is None:
            raise VerdictRefusedError(f"checkpoint {checkpoint_id} is not under quarantine")
        if checkpoint_id not in standing.checkpoint_ids:
            raise VerdictRefusedError(
                f"checkpoint {checkpoint_id} is covered by the quarantine of its ancestor "
                f"{', '.join(standing.checkpoint_ids)} (entry {standing.seq}): reinstate that one"
            )
        return Reinstated(
            **entry_head(history, owner, writer), checkpoint_id=checkpoint_id, by=by, reason=reason
        )

    entry = journal.append(decide, timeout=timeout)
    assert isinstance(entry, Reinstated)
    return entry


def record_verified(
    journal: Journal,
    checkpoint_id: str,
    *,
    by: str,
    owner: Owner,
    writer: str,
    detail: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Verified | None:
    """Append `Verified` at level bytes after a deep verification; None when it is not restorable any more."""

    def decide(history: History) -> Entry | None:
        if not history.restorable(checkpoint_id) or checkpoint_id not in history.manifests:
            return None
        standing = history.manifests[checkpoint_id]
        return Verified(
            **entry_head(history, owner, writer),
            checkpoint_id=checkpoint_id,
            sequence=standing.seq,
            manifest_sha256=standing.manifest.sha256,
            level="bytes",
            detail={"by": by, **(detail or {})},
        )

    entry = journal.append(decide, timeout=timeout)
    return entry if isinstance(entry, Verified) else None


def why_not(history: History, checkpoint_id: str) -> str:
    """Why a checkpoint cannot be restored, to follow its name in a sentence."""
    if checkpoint_id in history.retired:
        return "is retired: its objects are deleted"
    if checkpoint_id in history.quarantined:
        return f"is under quarantine ({history.quarantined[checkpoint_id].reason})"
    if checkpoint_id in history.doubted:
        slot = history.doubted[checkpoint_id]
        return (
            f"is in doubt: journal entry {slot} cannot be read and may have been its quarantine; restore that object, "
            "or answer for the checkpoint with rtj checkpoints reinstate"
        )
    known = ", ".join(list(history.manifests)[-3:]) or "none"
    return f"was never committed in this run; the newest commits: {known}"


def _quarantined(
    history: History,
    ids: list[str],
    fault: Literal["missing", "bytes", "state"],
    reason: str,
    *,
    owner: Owner,
    writer: str,
    file: str = "",
    covers_descendants: bool = False,
    detail: dict[str, Any],
) -> Quarantined:
    return Quarantined(
        **entry_head(history, owner, writer),
        checkpoint_ids=ids,
        fault=fault,
        reason=reason[:1000],
        file=file[:512],
        covers_descendants=covers_descendants,
        detail=detail,
    )

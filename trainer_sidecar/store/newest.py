"""The newest commit of a long journal without reading all of it: for lists, metrics and people, not for decisions.

`latest.json` only says where to begin (R18): the entry there must be the commit that it names, what follows is listed,
read and probed to the tail. When anything does not fit, the whole journal is read. A writer always reads the whole.
"""

from trainer_sidecar.contract.journal import (
    Attempt,
    Entry,
    Manifest,
    UnknownEntryError,
    UnparsableEntryError,
    parse_entry,
)
from trainer_sidecar.contract.keys import parse_journal_key
from trainer_sidecar.store.base import NotFoundError
from trainer_sidecar.store.fan_out import fan_out
from trainer_sidecar.store.journal import Journal


def find_newest(journal: Journal) -> Manifest | None:
    """The newest `Manifest` entry; None when nothing was committed. Raises StoreError.

    With a right hint: 1 GET of it, 1 listing page, the entries listed, 1 probe of the next slot.
    """
    hint = journal.latest()
    if hint is not None and hint.sequence > 0:
        found = _from(journal, hint.sequence, hint.checkpoint_id)
        if found is not None:
            return found
    commits = journal.read().manifests
    return next(reversed(commits.values()), None)


def _from(journal: Journal, start: int, checkpoint_id: str) -> Manifest | None:
    """The newest commit from slot `start` on; None when the hint or the listing does not fit."""
    after = journal.keys.journal(start - 1) if start > 1 else ""
    listed: list[int] = []
    for item in journal.store.list(journal.keys.journal_prefix, start_after=after):
        seq = parse_journal_key(f"/{item.key}")
        if seq != start + len(listed):
            break
        listed.append(seq)
    entries = list(fan_out(lambda seq: _entry(journal, seq), listed, journal.parallel))
    first = entries[0] if entries else None
    if not isinstance(first, Manifest) or first.checkpoint_id != checkpoint_id:
        return None
    following = start + len(entries)
    while (found := _get(journal, following)) is not None:  # listings may lag (R19)
        entries.append(_parsed(found, following))
        following += 1
    return _last_commit(first, entries)


def _last_commit(first: Manifest, entries: list[Entry | None]) -> Manifest:
    epoch, newest = first.epoch, first
    for entry in entries:
        if isinstance(entry, Attempt):
            epoch = entry.seq
        elif isinstance(entry, Manifest) and entry.epoch == epoch:
            newest = entry
    return newest


def _entry(journal: Journal, seq: int) -> Entry | None:
    data = _get(journal, seq)
    return None if data is None else _parsed(data, seq)


def _get(journal: Journal, seq: int) -> bytes | None:
    try:
        return journal.store.get(journal.keys.journal(seq))
    except NotFoundError:
        return None


def _parsed(data: bytes, seq: int) -> Entry | None:
    """None for void slots and for entries of a newer version."""
    try:
        return parse_entry(data, seq)
    except (UnparsableEntryError, UnknownEntryError):
        return None

"""The journal in a store: reading it to its tail, and appending one entry after the tail (protocol A, D).

The only writes are conditional creates of the next slot. An answer never decides, an occupied slot does: see R1, R2.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar
from uuid import uuid4

from trainer_sidecar.contract.journal import (
    MAX_ENTRY_BYTES,
    Entry,
    Latest,
    Owner,
    UnknownEntryError,
    UnparsableEntryError,
    parse_entry,
)
from trainer_sidecar.contract.keys import RunKeys, parse_journal_key
from trainer_sidecar.store.base import AlreadyExistsError, NotFoundError, Store, StoreError, UnclearError
from trainer_sidecar.store.fan_out import fan_out
from trainer_sidecar.store.history import Gap, History, Slot
from trainer_sidecar.store.rebuild import rebuilt

T = TypeVar("T")
log = logging.getLogger(__name__)

Decide = Callable[[History], Entry | None]
"""Makes the entry for slot `history.next_seq`, or None to give up. Run again, on newer history, at each refusal."""

_MAX_STRAYS = 16


class JournalError(Exception):
    """The journal cannot be written by us. Not a store error: the store answered well."""


class JournalLostError(JournalError):
    """A part of the journal is missing (R11, R16). Never read as "start from scratch"."""


class JournalTooNewError(JournalError):
    """A newer version has written here; this one must not (R17)."""


class EntryTooLargeError(JournalError):
    """An entry is above 8 KiB."""


class AppendUndecidedError(UnclearError):
    """Deadline or stop came while a claim was on its way: it may still land. Read before relying on either."""

    reason = "AppendUndecided"


def entry_head(history: History, owner: Owner, writer: str) -> dict[str, Any]:
    """Fields that any entry of the newest attempt's epoch begins with, for the next slot; `time` in Unix seconds."""
    return {
        "seq": history.next_seq,
        "epoch": history.epoch,
        "owner": owner,
        "writer": writer,
        "nonce": uuid4().hex,
        "time": time.time(),
    }


class Journal:
    """One run's journal. Not thread-safe: one owner per instance; several instances may race, that is what it is for.

    `pause(seconds, stop)` waits between tries and is a seam for tests.
    """

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        *,
        parallel: int = 16,
        pause: Callable[[float, threading.Event], None] | None = None,
    ) -> None:
        self.store, self.keys, self.parallel = store, keys, parallel
        self._pause = pause or _wait
        self._history = History()

    def beside(self, keys: RunKeys) -> "Journal":
        """Another run's journal in the same store, with the same settings."""
        return Journal(self.store, keys, parallel=self.parallel, pause=self._pause)

    @property
    def history(self) -> History:
        """What the last read has seen."""
        return self._history

    def read(self) -> History:
        """The whole journal, with contiguity checked from slot 1 (R19). Raises StoreError.

        Entries known already are only looked for in the listing, others are fetched. A slot that cannot be read is
        fetched again by each read (the store may have answered badly, or somebody has restored the object), and filled
        where it provably was a commit (`rebuild`).
        """
        hint = self.latest()  # first: what it names was there before
        listed = self._listed()
        outdated = self._some_known_is_gone(set(listed)) or self._some_void_can_be_read()
        self._history = History() if outdated else replace(self._history, gap=None)
        ahead = [seq for seq in listed if seq > self._history.tail]
        run = takewhile(lambda pair: pair[0] == pair[1], enumerate(ahead, start=self._history.tail + 1))
        self._fold(self._get_slots([seq for _, seq in run]))
        self.refresh()
        self._look_for_gap([seq for seq in listed if seq > self._history.tail])
        self._history = replace(self._history, hint=hint)
        if self._history.void:
            self._history = rebuilt(self.store, self.keys, self._history, hint)
        return self._history

    def refresh(self) -> History:
        """Everything after what is known, by GET until 404 (R18, R19): no listing, no hint."""
        while True:
            slot = self._get_slot(self._history.tail + 1)
            if slot is None:
                return self._history
            self._fold([slot])

    def append(
        self,
        decide: Decide,
        *,
        stop: threading.Event | None = None,
        timeout: float | None = None,
    ) -> Entry | None:
        """Append what `decide` makes of the history at the tail; the entry as it stands, or None when it gave up.

        The entry's `seq` must be `history.next_seq`. Retries for ever unless `timeout` (seconds) or `stop` ends it.
        Raises AppendUndecidedError (may still land), JournalLostError, JournalTooNewError, EntryTooLargeError,
        StoreError when the store refuses for good, and whatever `decide` raises.
        """
        patience = _Patience(stop or threading.Event(), timeout, self._pause)
        while True:
            history = patience.insist(self.refresh)
            self.check_writable(history)
            entry = decide(history)
            if entry is None:
                return None
            assert entry.seq == history.next_seq, (
                f"entry made for slot {entry.seq}, the tail is {history.tail}"
            )
            slot = self._claim(entry, patience)
            self._fold([slot])
            if slot.entry is not None and slot.entry.nonce == entry.nonce:
                return slot.entry

    def check_writable(self, history: History) -> None:
        """Raises when nothing may be appended to a journal like this."""
        if history.unknown:
            seq, why = next(iter(history.unknown.items()))
            raise JournalTooNewError(f"{self.store.url}: {self.keys.journal(seq)}: {why}")
        if history.lost_attempts:
            slot, proof = next(iter(history.lost_attempts.items()))
            raise JournalLostError(
                f"{self.store.url}: {self.keys.journal(slot)} cannot be read, and entry {proof} proves that an attempt "
                "stood there: without it its checkpoints do not count. Something has damaged or overwritten it: "
                "restore the object from a version or a backup, nothing is written or deleted until then"
            )
        if history.gap is not None:
            raise JournalLostError(
                f"{self.store.url}: journal of run {self.keys.prefix} lacks entry {history.gap.missing} while entry "
                f"{history.gap.later} exists: something deleted a part of it. Exclude {self.keys.journal_prefix} "
                "from lifecycle rules and restore the missing objects; nothing is written until then"
            )

    def latest(self) -> Latest | None:
        """`latest.json`, a hint; None when it is missing, garbage or cannot be read now."""
        try:
            return Latest.model_validate_json(self.store.get(self.keys.latest))
        except (StoreError, ValueError):
            return None

    def _claim(self, entry: Entry, patience: "_Patience") -> Slot:
        """PUT the same bytes until the slot is occupied, by whomever (R1); what stands there then."""
        key, data = self.keys.journal(entry.seq), entry.to_bytes()
        if len(data) > MAX_ENTRY_BYTES:
            raise EntryTooLargeError(
                f"{key}: {entry.kind} entry of {len(data)} bytes, the limit is {MAX_ENTRY_BYTES}"
            )
        sent = False
        while True:
            try:
                self.store.create(key, data)
                return Slot(entry.seq, entry)
            except AlreadyExistsError:
                sent = True  # 412 is unclear too: it may be our own earlier try (R2)
            except StoreError as exc:
                if not exc.retryable and not sent:
                    raise
                sent = True
                log.info("claim of %s is unclear, reading back: %s", key, exc)
            slot = self._read_back(entry.seq, patience)
            if slot is not None:
                return slot
            patience.wait(f"claim of {key}")

    def _read_back(self, seq: int, patience: "_Patience") -> Slot | None:
        try:
            return self._get_slot(seq)
        except StoreError as exc:
            patience.note(exc)
            return None

    def _listed(self) -> Sequence[int]:
        found = (parse_journal_key(f"/{o.key}") for o in self.store.list(self.keys.journal_prefix))
        return sorted(seq for seq in found if seq is not None and seq > 0)

    def _some_known_is_gone(self, listed: set[int]) -> bool:
        """Listings may lag (R19): only a GET tells that an entry is gone."""
        unlisted = (seq for seq in range(1, self._history.tail + 1) if seq not in listed)
        return any(self._get_slot(seq) is None for seq in unlisted)

    def _some_void_can_be_read(self) -> bool:
        unread = sorted((*self._history.void, *self._history.rebuilt))
        found = fan_out(self._get_slot, unread, self.parallel)
        return any(slot is not None and (slot.entry is not None or slot.unknown) for slot in found)

    def _look_for_gap(self, strays: Sequence[int]) -> None:
        """A readable entry beyond the tail proves that slots were deleted; anything else there is garbage (R18)."""
        for seq in strays[:_MAX_STRAYS]:
            slot = self._get_slot(seq)
            if slot is not None and (slot.entry is not None or slot.unknown) and seq > self.refresh().tail:
                self._history = replace(self._history, gap=Gap(self._history.tail + 1, seq))
                return

    def _get_slots(self, seqs: Sequence[int]) -> Iterator[Slot]:
        """The slots in order, up to the first one that is gone."""
        for slot in fan_out(self._get_slot, seqs, self.parallel):
            if slot is None:
                return
            yield slot

    def _get_slot(self, seq: int) -> Slot | None:
        """None when it is free. What cannot be read is read twice: something on the way may have answered (R24)."""
        slot = self._get_once(seq)
        if slot is None or slot.entry is not None or slot.unknown:
            return slot
        return self._get_once(seq)

    def _get_once(self, seq: int) -> Slot | None:
        try:
            data = self.store.get(self.keys.journal(seq))
        except NotFoundError:
            return None
        try:
            return Slot(seq, parse_entry(data, seq))
        except UnknownEntryError as exc:
            return Slot(seq, unknown=str(exc))
        except UnparsableEntryError as exc:
            log.info("%s: %s: %s", self.store.url, self.keys.journal(seq), exc)
            return Slot(seq)

    def _fold(self, slots: Iterable[Slot]) -> None:
        tail = self._history.tail
        self._history = self._history.with_slots(slots)
        for seq in (v for v in self._history.void if v > tail):
            log.warning("%s: %s cannot be read and counts as void", self.store.url, self.keys.journal(seq))


def _wait(seconds: float, stop: threading.Event) -> None:
    stop.wait(seconds)


class _Patience:
    """Backoff with full jitter between tries, until a stop event or a deadline on the monotonic clock."""

    def __init__(
        self,
        stop: threading.Event,
        timeout: float | None,
        pause: Callable[[float, threading.Event], None],
    ) -> None:
        self._stop, self._pause, self._tries = stop, pause, 0
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._last: StoreError | None = None

    def note(self, exc: StoreError) -> None:
        self._last = exc

    def insist(self, act: Callable[[], T]) -> T:
        """`act`, tried again while the store is away. Raises its error when that is final or patience ends."""
        while True:
            try:
                return act()
            except StoreError as exc:
                self.note(exc)
                if not exc.retryable or self._over():
                    raise
                self._sleep()

    def wait(self, what: str) -> None:
        """Raises AppendUndecidedError when patience has ended."""
        if self._over():
            raise AppendUndecidedError(
                f"{what} is undecided: given up by stop or deadline while the store was unclear ({self._last}); "
                "it may still land, read the journal before relying on either"
            )
        self._sleep()

    def _over(self) -> bool:
        return self._stop.is_set() or (self._deadline is not None and time.monotonic() >= self._deadline)

    def _sleep(self) -> None:
        self._tries += 1
        self._pause(random.uniform(0, min(5.0, 0.05 * 2 ** min(self._tries, 7))), self._stop)

"""What the journal says: a pure fold of its entries. Values in, values out; no store, no clock.

The fold is defensive: a `Manifest` counts only when its epoch is that of the newest `Attempt` before it, so that an
entry which a broken writer slipped past the fence commits nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from trainer_sidecar.contract.journal import (
    Aborted,
    Attempt,
    Entry,
    Hold,
    Latest,
    Manifest,
    Owner,
    Quarantined,
    Reinstated,
    Released,
    RestorePoint,
    Retired,
    Verified,
)
from trainer_sidecar.contract.keys import parse_checkpoint_id


@dataclass(frozen=True)
class Gap:
    """A slot that is free although a later one holds an entry: something deleted a part of the journal (R16)."""

    missing: int
    later: int


@dataclass(frozen=True)
class History:
    """The journal from slot 1 to `tail`, folded. `entries` are in order; void slots (R17) have none."""

    entries: tuple[Entry, ...] = ()
    tail: int = 0
    void: tuple[int, ...] = ()
    hint: Latest | None = None
    """`latest.json` as it was before the journal was read: it decides nothing (R18), but is written after a commit."""
    unknown: Mapping[int, str] = field(default_factory=dict)
    """Slot -> why it cannot be understood: a newer version wrote here, this one must not write (R17)."""
    gap: Gap | None = None
    rebuilt: Mapping[int, str] = field(default_factory=dict)
    """Slot that cannot be read -> the checkpoint whose commit it provably was (`rebuild`), and is in `entries`."""

    def with_slots(self, slots: Iterable["Slot"]) -> "History":
        """The history with further slots, which must follow the tail one by one."""
        entries, void, unknown, tail = list(self.entries), list(self.void), dict(self.unknown), self.tail
        for slot in slots:
            assert slot.seq == tail + 1, f"slot {slot.seq} does not follow {tail}"
            tail = slot.seq
            if slot.entry is not None:
                entries.append(slot.entry)
            elif slot.unknown:
                unknown[slot.seq] = slot.unknown
            else:
                void.append(slot.seq)
        return replace(self, entries=tuple(entries), void=tuple(void), unknown=unknown, tail=tail)

    def with_rebuilt(self, commit: Manifest) -> "History":
        """The history with the commit that stood in a void slot."""
        assert commit.seq in self.void, f"slot {commit.seq} is not void"
        return replace(
            self,
            entries=tuple(sorted((*self.entries, commit), key=lambda e: e.seq)),
            void=tuple(seq for seq in self.void if seq != commit.seq),
            rebuilt={**self.rebuilt, commit.seq: commit.checkpoint_id},
        )

    @cached_property
    def lost_attempts(self) -> dict[int, int]:
        """Void slot -> an entry that names it as its epoch: an `Attempt` stood there, and with it all that it committed
        would be lost (R11)."""
        void = set(self.void)
        return {e.epoch: e.seq for e in reversed(self.entries) if e.epoch in void}

    @cached_property
    def unexplained(self) -> tuple[int, ...]:
        """Void slots that may have been anything. The others were commits: of their epoch just as many checkpoints
        were retired whose commits are found nowhere else."""
        lost = Counter(_epoch_in(i) for i in self.retired if i not in self.manifests)
        epochs = {seq: max((a.seq for a in self.attempts if a.seq < seq), default=0) for seq in self.void}
        void = Counter(epochs.values())
        return tuple(s for s in self.void if not epochs[s] or lost[epochs[s]] != void[epochs[s]])

    @property
    def next_seq(self) -> int:
        """The slot that a writer would claim."""
        return self.tail + 1

    @cached_property
    def attempts(self) -> tuple[Attempt, ...]:
        """All fences, oldest first."""
        return tuple(e for e in self.entries if isinstance(e, Attempt))

    @property
    def newest(self) -> Attempt | None:
        """The attempt that may write."""
        return self.attempts[-1] if self.attempts else None

    @property
    def epoch(self) -> int:
        """Sequence of the newest `Attempt`; 0 before the first (R8)."""
        return self.attempts[-1].seq if self.attempts else 0

    @property
    def owner(self) -> Owner | None:
        """Owner of the newest attempt."""
        return self.attempts[-1].owner if self.attempts else None

    @property
    def next_attempt(self) -> int:
        """Number of the next attempt: the highest in the journal + 1 (R8)."""
        return max((a.attempt for a in self.attempts), default=0) + 1

    def attempt_with(self, nonce: str) -> Attempt | None:
        """The attempt that carries `nonce` (R9)."""
        return next((a for a in self.attempts if a.nonce == nonce), None)

    @cached_property
    def manifests(self) -> dict[str, Manifest]:
        """Committed checkpoints by id, oldest first; of two entries for one id the first counts."""
        return _commits(self.entries)

    @cached_property
    def aborted(self) -> frozenset[str]:
        """Ids of saves that were given up before any commit of theirs (R3)."""
        return frozenset(
            e.checkpoint_id
            for e in self.entries
            if isinstance(e, Aborted)
            and not (e.checkpoint_id in self.manifests and self.manifests[e.checkpoint_id].seq < e.seq)
        )

    @cached_property
    def retired(self) -> dict[str, Retired]:
        """Ids that retention has given up, for good."""
        return {i: e for e in self.entries if isinstance(e, Retired) for i in e.checkpoint_ids}

    @cached_property
    def quarantined(self) -> dict[str, Quarantined]:
        """Ids under quarantine with the entry that put them there; a state fault covers descendants (R21)."""
        direct: dict[str, Quarantined] = {}
        retired: set[str] = set()
        for e in self.entries:
            if isinstance(e, Retired):
                retired.update(e.checkpoint_ids)
            elif isinstance(e, Quarantined):
                direct.update((i, e) for i in e.checkpoint_ids if i not in direct and i not in retired)
            elif isinstance(e, Reinstated):
                direct.pop(e.checkpoint_id, None)
        return _with_descendants(direct, self)

    @cached_property
    def doubted(self) -> dict[str, int]:
        """Checkpoint id -> void slot behind its commit that may have been its quarantine: nobody knows what it was.

        What somebody who could still read the slot has found restorable after it, or a person answers for, is not in
        doubt: a later `Attempt` that starts from it, its `Verified`, its `Reinstated`. Nor is what was committed behind
        the slot: only a quarantine that covers descendants would speak of it, and that one is written twice.
        """
        if not self.unexplained:
            return {}
        heard: dict[str, int] = {}
        for e in self.entries:
            if isinstance(e, Verified | Reinstated):
                heard[e.checkpoint_id] = e.seq
            elif isinstance(e, Attempt) and e.restore is not None:
                heard[e.restore.checkpoint_id] = e.seq
        known = {m.checkpoint_id: m.seq for m in self.manifests.values()}
        if self.fork_point is not None:
            known.setdefault(self.fork_point.checkpoint_id, self.attempts[0].seq)
        newest = self.unexplained[-1]
        return {
            i: newest
            for i, seq in known.items()
            if newest > max(seq, heard.get(i, 0)) and i not in self.retired
        }

    @property
    def damage(self) -> str:
        """What of the journal cannot be read and what follows from it, for people; empty when all can."""
        told = [
            f"journal entry {seq} cannot be read; it was the commit of {i}, which its manifest.json proves, and counts"
            for seq, i in self.rebuilt.items()
        ]
        for seq in self.void:
            if seq in self.lost_attempts:
                continue  # refused by who writes, in its own words
            if seq not in self.unexplained:
                told.append(
                    f"journal entry {seq} cannot be read; it was the commit of a checkpoint that is retired"
                )
                continue
            doubted = sum(slot == seq for slot in self.doubted.values())
            unused = (
                f"{doubted} checkpoints from before it are not used, since it may have been their quarantine: restore "
                "the object from a version or a backup, or answer for one with rtj checkpoints reinstate"
                if doubted
                else "no checkpoint that could be used depends on it"
            )
            told.append(f"journal entry {seq} cannot be read and nobody knows what it said; {unused}")
        if self.hint is not None and self._lacks(self.hint):
            told.append(
                f"latest.json names journal entry {self.hint.sequence} as the commit of {self.hint.checkpoint_id}, and "
                "no such commit is there: unless somebody has edited that file, the newest entries of the journal were "
                "deleted or the store was set back to an earlier state. The checkpoint is not used. Entries may be put "
                "back, from versions or a backup, only where nothing has been written to the journal since: in the "
                "slot of a newer entry, or behind a newer attempt, an old one does harm or does not count"
            )
        return "; ".join(told)

    def _lacks(self, hint: Latest) -> bool:
        """Whether the commit that a hint names is provably not where it says."""
        if self.gap is not None or self.unknown or self.lost_attempts or hint.sequence in self.void:
            return False  # which is said in other words
        found = next((e for e in self.entries if e.seq == hint.sequence), None)
        return not isinstance(found, Manifest) or found.checkpoint_id != hint.checkpoint_id

    @cached_property
    def verified(self) -> dict[str, Verified]:
        """Newest verification by id, of those neither retired nor under quarantine."""
        return {
            e.checkpoint_id: e
            for e in self.entries
            if isinstance(e, Verified)
            and e.checkpoint_id in self.manifests
            and e.checkpoint_id not in self.retired
            and e.checkpoint_id not in self.quarantined
        }

    @cached_property
    def holds(self) -> dict[str, frozenset[str]]:
        """Checkpoint id -> holders (forks, drills, users). Held ones are never retired (R14, R15)."""
        held: dict[str, set[str]] = {}
        for e in self.entries:
            if isinstance(e, Hold):
                held.setdefault(e.checkpoint_id, set()).add(e.holder)
            elif isinstance(e, Released):
                held.get(e.checkpoint_id, set()).discard(e.holder)
        return {i: frozenset(h) for i, h in held.items() if h}

    @cached_property
    def lineage(self) -> tuple[Manifest, ...]:
        """The surviving history, newest first: what the newest attempt committed, what it started from, and that one's
        parents (R20). Checkpoints of attempts that a later one did not build on are not in it."""
        return self.lineage_of(self.newest) if self.newest else ()

    def lineage_of(self, attempt: Attempt) -> tuple[Manifest, ...]:
        own = [m for m in reversed(self.manifests.values()) if m.epoch == attempt.seq]
        chain: list[Manifest] = []
        cursor = attempt.restore.checkpoint_id if attempt.restore and attempt.restore.source is None else None
        while cursor is not None and cursor in self.manifests and len(chain) <= len(self.manifests):
            chain.append(self.manifests[cursor])
            cursor = self.manifests[cursor].parent
        return (*own, *chain)

    @cached_property
    def fork_point(self) -> RestorePoint | None:
        """The checkpoint of another run that this one's first attempt started from, if it is a fork (R15)."""
        first = self.attempts[0].restore if self.attempts else None
        return first if first is not None and first.source is not None else None

    def restorable(self, checkpoint_id: str) -> bool:
        """Committed (or the fork point), not retired, not under quarantine, and not in doubt."""
        known = checkpoint_id in self.manifests or (
            self.fork_point is not None and self.fork_point.checkpoint_id == checkpoint_id
        )
        out = (self.retired, self.quarantined, self.doubted)
        return known and not any(checkpoint_id in ids for ids in out)

    def restore_point_of(self, checkpoint_id: str) -> RestorePoint:
        """The restore point that a committed checkpoint, or the fork point, is. KeyError for others."""
        fork = self.fork_point
        if fork is not None and fork.checkpoint_id == checkpoint_id:
            return fork
        return restore_point(self.manifests[checkpoint_id])

    @cached_property
    def newest_restorable(self) -> RestorePoint | None:
        """Where the next attempt would start: the highest sequence on the lineage that is restorable (R20)."""
        for manifest in self.lineage:
            if self.restorable(manifest.checkpoint_id):
                return restore_point(manifest)
        if self.fork_point is not None and self.restorable(self.fork_point.checkpoint_id):
            return self.fork_point
        return None

    def parent_for(self, epoch: int) -> str | None:
        """Parent of the next commit of `epoch`: that epoch's newest commit, else what its attempt started from."""
        attempt = next((a for a in self.attempts if a.seq == epoch), None)
        if attempt is None:
            return None
        own = [m for m in self.manifests.values() if m.epoch == epoch]
        if own:
            return own[-1].checkpoint_id
        return attempt.restore.checkpoint_id if attempt.restore else None


@dataclass(frozen=True)
class Slot:
    """One occupied slot: its entry; or `unknown` with the reason; or neither, when its bytes are void (R17)."""

    seq: int
    entry: Entry | None = None
    unknown: str = ""


def _epoch_in(checkpoint_id: str) -> int:
    """The epoch that a checkpoint's id names; 0 for no id."""
    try:
        return parse_checkpoint_id(checkpoint_id)[1]
    except ValueError:
        return 0


def restore_point(manifest: Manifest) -> RestorePoint:
    """The restore point that a commit is."""
    return RestorePoint(
        checkpoint_id=manifest.checkpoint_id,
        sequence=manifest.seq,
        step=manifest.step,
        manifest=manifest.manifest,
    )


def _commits(entries: Iterable[Entry]) -> dict[str, Manifest]:
    epoch = 0
    found: dict[str, Manifest] = {}
    aborted: set[str] = set()
    for entry in entries:
        if isinstance(entry, Attempt):
            epoch = entry.seq
        elif isinstance(entry, Aborted):
            aborted.add(entry.checkpoint_id)
        elif isinstance(entry, Manifest) and entry.epoch == epoch and entry.checkpoint_id not in aborted:
            found.setdefault(entry.checkpoint_id, entry)
    return found


def _with_descendants(direct: dict[str, Quarantined], history: History) -> dict[str, Quarantined]:
    covered = dict(direct)
    for checkpoint_id, manifest in history.manifests.items():  # parents come before children
        parent = covered.get(manifest.parent or "")
        if parent is not None and parent.covers_descendants and parent.fault == "state":
            covered.setdefault(checkpoint_id, parent)
    return covered

"""Which steps of a run survive, read off its journal alone.

Every commit and every attempt names what it started from (protocol, "lineage"): walking back from the newest commit
of the newest attempt gives stretches of steps, each trained by one epoch, that meet without a gap. The walk is written
anew here on purpose, so that an error in the writers' own reading of the journal shows up as a contradiction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.contract.journal import Attempt, Entry, Manifest, Quarantined, Reinstated


class HistoryError(ValueError):
    """The journal does not tell one gapless history."""


@dataclass(frozen=True)
class Stretch:
    """Steps `start` + 1 to `end` of the surviving history, trained by `attempt` and kept by `commit`."""

    attempt: Attempt
    start: int
    end: int
    commit: Manifest

    @property
    def epoch(self) -> int:
        return self.attempt.seq

    @property
    def steps(self) -> range:
        return range(self.start + 1, self.end + 1)


@dataclass(frozen=True)
class History:
    """Stretches from step 0 (or the fork point) on, oldest first; `attempts` are all, whether they survived or not."""

    stretches: list[Stretch]
    attempts: list[Attempt]
    commits: list[Manifest]

    @property
    def last_step(self) -> int:
        return self.stretches[-1].end if self.stretches else 0

    @property
    def global_batch_size(self) -> int:
        """Of the newest attempt; it never changes within a run (design 5)."""
        return self.attempts[-1].topology.batch.global_batch_size

    def stretch_of(self, step: int) -> Stretch:
        """The stretch that a surviving step belongs to. Raises KeyError for a step outside of the history."""
        for stretch in self.stretches:
            if step in stretch.steps:
                return stretch
        raise KeyError(f"step {step} is not in the surviving history (1 to {self.last_step})")


def surviving_history(entries: Sequence[Entry]) -> History:
    """Walk back from the newest commit. `entries` are slots 1 to tail, void ones left out.

    Raises HistoryError naming the entries that contradict each other.
    """
    attempts = {e.seq: e for e in entries if isinstance(e, Attempt)}
    commits = {e.seq: e for e in entries if isinstance(e, Manifest)}
    if not attempts:
        raise HistoryError("the journal holds no Attempt")
    stretches: list[Stretch] = []
    newest = attempts[max(attempts)]
    attempt: Attempt | None = newest
    commit = max((c for c in commits.values() if c.epoch == newest.seq), key=lambda c: c.seq, default=None)
    while attempt is not None:
        start = attempt.restore.step if attempt.restore else 0
        if commit is not None:
            if commit.step < start:
                raise HistoryError(
                    f"commit {commit.seq} is of step {commit.step}, its attempt started at {start}"
                )
            stretches.append(Stretch(attempt, start, commit.step, commit))
        commit, attempt = _origin(attempt, attempts, commits)
    return History(stretches[::-1], list(attempts.values()), list(commits.values()))


def _origin(
    attempt: Attempt, attempts: dict[int, Attempt], commits: dict[int, Manifest]
) -> tuple[Manifest | None, Attempt | None]:
    """The commit that an attempt was restored from, and the attempt that made it; nothing for a fresh start."""
    restore = attempt.restore
    if restore is not None and restore.source is not None:
        return None, None  # a fork (R15): what came before is another run's history
    if restore is None:
        if any(seq < attempt.seq for seq in commits):
            raise HistoryError(
                f"attempt entry {attempt.seq} starts from scratch although commits stand before it (R11)"
            )
        return None, None
    commit = commits.get(restore.sequence)
    if commit is None or commit.seq > attempt.seq:
        raise HistoryError(
            f"attempt entry {attempt.seq} restores entry {restore.sequence}, which is no earlier commit"
        )
    if (commit.checkpoint_id, commit.step, commit.manifest) != (
        restore.checkpoint_id,
        restore.step,
        restore.manifest,
    ):
        raise HistoryError(
            f"attempt entry {attempt.seq} and commit {commit.seq} disagree on checkpoint, step or digest"
        )
    if commit.epoch not in attempts:
        raise HistoryError(f"commit {commit.seq} names epoch {commit.epoch}, which no Attempt entry has")
    return commit, attempts[commit.epoch]


def prove_fenced(entries: Sequence[Entry]) -> Proof:
    """No commit stands behind the fence of a newer attempt (design 2, rule R4)."""
    late: list[str] = []
    newest = 0
    for entry in sorted(entries, key=lambda e: e.seq):
        if isinstance(entry, Attempt):
            newest = entry.seq
        elif isinstance(entry, Manifest) and entry.epoch != newest:
            late.append(
                f"entry {entry.seq} commits step {entry.step} for epoch {entry.epoch} behind fence {newest}"
            )
    count = sum(isinstance(e, Manifest) for e in entries)
    return Proof(
        "no zombie commit", f"all {count} commits stand before the next fence", {"commits": count}, late
    )


def prove_newest_picked(entries: Sequence[Entry]) -> Proof:
    """Every attempt started from the newest commit before it that was not under quarantine then (R20, R21)."""
    wrong: list[str] = []
    ordered = sorted(entries, key=lambda e: e.seq)
    resumed = 0
    for place, entry in enumerate(ordered):
        if isinstance(entry, Attempt) and (candidates := _candidates(ordered[:place])):
            resumed += 1
            picked = entry.restore.sequence if entry.restore else None
            if picked != candidates[-1].seq:
                wrong.append(
                    f"attempt {entry.attempt} picked entry {picked}, the newest commit was {candidates[-1].seq}"
                )
    claim = f"{resumed} resumes, each from the newest commit before its fence"
    return Proof("newest commit picked", claim, {"resumes": resumed}, wrong)


def _candidates(before: Sequence[Entry]) -> list[Manifest]:
    """Commits that no quarantine names or covers and that is not taken back; parents come before their children."""
    named: dict[str, Quarantined] = {}
    for entry in before:
        if isinstance(entry, Quarantined):
            named = {**dict.fromkeys(entry.checkpoint_ids, entry), **named}
        elif isinstance(entry, Reinstated):
            named.pop(entry.checkpoint_id, None)
    left, tainted = [], {i for i, verdict in named.items() if verdict.covers_descendants}
    for commit in before:
        if not isinstance(commit, Manifest):
            continue
        if commit.checkpoint_id not in named and commit.parent not in tainted:
            left.append(commit)
        elif commit.parent in tainted:
            tainted.add(commit.checkpoint_id)
    return left

"""The judgement over one job, from its journal, its store and what its ranks logged. Pure: evidence in, proofs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hack.chaos.journals import Damage
from trainer_sidecar.audit.history import (
    History,
    HistoryError,
    prove_fenced,
    prove_newest_picked,
    surviving_history,
)
from trainer_sidecar.audit.ledger import LedgerError, Ledgers
from trainer_sidecar.audit.losses import loss_curve, prove_same_losses
from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.audit.samples import consumed_samples, prove_exactly_once
from trainer_sidecar.contract.journal import Attempt, Entry, Manifest, Quarantined, Retired

TOLERANCE = 1e-9
"""Of losses, relatively: 64 bit floats, added in the order of the mesh."""


@dataclass(frozen=True)
class Control:
    """What a run that nobody disturbed consumes and logs."""

    samples: int
    """In the dataset."""
    batches: Sequence[list[int]]
    """Of step 1, 2, ..."""
    losses: Sequence[float]

    @property
    def curve(self) -> dict[int, float]:
        return dict(enumerate(self.losses, 1))


@dataclass(frozen=True)
class Evidence:
    """What one job left behind."""

    job: str
    entries: Sequence[Entry]
    """Its journal at the end."""
    seen: Sequence[Entry]
    """Its journal as it was read while it grew."""
    ledgers: Ledgers
    damages: Sequence[Damage]
    problems: Mapping[str, str]
    """Checkpoint that stands -> what is wrong with its bytes, "" when every byte is proven."""


def audit(evidence: Evidence, control: Control) -> list[Proof]:
    """Every proof over a job."""
    try:
        history = surviving_history(evidence.entries)
    except HistoryError as error:
        return [Proof("history", "the journal tells one history without a gap", {}, [str(error)])]
    return [
        prove_ended(history, control),
        prove_exactly_once(history, evidence.ledgers, dataset_size=control.samples),
        prove_batches(history, evidence.ledgers, control),
        _losses(history, evidence.ledgers, control),
        prove_fenced(evidence.entries),
        prove_newest_picked(evidence.entries),
        prove_damage_refused(evidence),
        prove_commits_stand(evidence),
    ]


def prove_ended(history: History, control: Control) -> Proof:
    """The surviving history goes from step 1 to the last one that was asked for."""
    first = history.stretches[0].start if history.stretches else 0
    wrong = [f"it begins behind step {first}"] if first else []
    if history.last_step != len(control.batches):
        wrong.append(f"it ends at step {history.last_step} of {len(control.batches)}")
    return Proof("trained to the end", f"steps 1 to {history.last_step}", {"steps": history.last_step}, wrong)


def prove_batches(history: History, ledgers: Ledgers, control: Control) -> Proof:
    """Each surviving step consumed the samples that the control run consumes in it, in the same order."""
    wrong = []
    for stretch in history.stretches:
        for step in stretch.steps:
            try:
                found = consumed_samples(stretch, step, ledgers)
            except LedgerError:
                continue  # told by the proof that each sample was consumed once
            if step > len(control.batches) or found != control.batches[step - 1]:
                wrong.append(f"step {step} of epoch {stretch.epoch} consumed {found}")
    claim = f"the batches of all {history.last_step} steps are the control run's"
    return Proof("samples of the control run", claim, {"steps": history.last_step}, wrong)


def _losses(history: History, ledgers: Ledgers, control: Control) -> Proof:
    try:
        curve = loss_curve(history, ledgers)
    except LedgerError as error:
        return Proof("loss of the control run", "", {}, [str(error)])
    return prove_same_losses(curve, control.curve, tolerance=TOLERANCE, steps=history.last_step)


def prove_damage_refused(evidence: Evidence) -> Proof:
    """No step was trained from changed bytes, and nothing but changed bytes was put under quarantine."""
    damaged = {damage.checkpoint: damage.time for damage in evidence.damages}
    wrong, refused = [], 0
    for entry in evidence.entries:
        if isinstance(entry, Quarantined):
            refused += 1
            sound = [i for i in entry.checkpoint_ids if i not in damaged]
            wrong += [
                f"entry {entry.seq} puts {i} under quarantine, whose bytes nobody changed" for i in sound
            ]
        elif isinstance(entry, Attempt) and entry.restore:
            moment = damaged.get(entry.restore.checkpoint_id)
            steps = len(evidence.ledgers.of_epoch(entry.seq))
            if moment is not None and moment < entry.time and steps:
                wrong.append(
                    f"attempt {entry.attempt} trained {steps} steps from {entry.restore.checkpoint_id}, "
                    f"whose bytes had been changed {entry.time - moment:.1f} s before its fence"
                )
    claim = f"{len(damaged)} checkpoints were damaged, {refused} of them were picked, refused and quarantined"
    return Proof("damage never trained from", claim, {"damaged": len(damaged), "refused": refused}, wrong)


def prove_commits_stand(evidence: Evidence) -> Proof:
    """What was in the journal once is there now, and every commit that nobody took away is whole, byte for byte."""
    now = {entry.seq: entry for entry in evidence.entries}
    lost = [
        f"entry {entry.seq} ({entry.kind}) was there and is {'another' if entry.seq in now else 'gone'} now"
        for entry in evidence.seen
        if now.get(entry.seq) != entry
    ]
    standing = standing_commits(evidence.entries, evidence.damages)
    for commit in standing:
        problem = evidence.problems.get(commit.checkpoint_id, "nobody looked at its bytes")
        if problem:
            lost.append(f"{commit.checkpoint_id} (entry {commit.seq}): {problem}")
    commits = sum(isinstance(entry, Manifest) for entry in evidence.entries)
    claim = f"{commits} commits, {len(standing)} of them neither retired nor damaged, and all those are whole"
    return Proof("no commit lost", claim, {"commits": commits, "whole": len(standing)}, lost)


def standing_commits(entries: Sequence[Entry], damages: Sequence[Damage]) -> list[Manifest]:
    """Commits that must be whole: retention has not given them up, and nobody has changed their bytes.

    A quarantine does not excuse a commit: the objects stay, and only damaged ones may be under it.
    """
    gone = {i for entry in entries if isinstance(entry, Retired) for i in entry.checkpoint_ids}
    gone |= {damage.checkpoint for damage in damages}
    return [entry for entry in entries if isinstance(entry, Manifest) and entry.checkpoint_id not in gone]

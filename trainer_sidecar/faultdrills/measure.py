"""What a fault cost, and whether what went on is what was there: from the journal and from what the ranks told.

Nothing here asks a cluster, so that the figures of a drill can be tested without one.
"""

from collections.abc import Sequence

from trainer_sidecar.audit.history import prove_fenced, prove_newest_picked, surviving_history
from trainer_sidecar.audit.ledger import LedgerError, Ledgers
from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.audit.samples import prove_exactly_once
from trainer_sidecar.contract.journal import Attempt, Entry
from trainer_sidecar.faultdrills.outcome import Check, Loss
from trainer_sidecar.faultdrills.trail import Trail

DATASET = 1 << 16
"""Samples that the drills' script trains on."""
_EQUAL = "steps made twice are equal"


def step_of(attempt: Attempt) -> int:
    """The step that an attempt started from."""
    return attempt.restore.step if attempt.restore else 0


def lost(trail: Trail, before: Attempt, after: Attempt) -> Loss:
    """Steps of `before` that `after` makes again: from its restore point to the last step that a rank had told."""
    return between(trail, before, step_of(after), max(trail.steps(before.seq), default=0))


def between(trail: Trail, attempt: Attempt, back: int, last: int) -> Loss:
    """Steps `back` + 1 to `last` of an attempt, and the seconds that they took by the clock of a rank's node."""
    steps = max(0, last - back)
    end = trail.step_time(last, attempt.seq)
    start = trail.step_time(back, attempt.seq) or attempt.time
    seconds = max(0.0, end - start) if steps and end is not None else 0.0
    batch = attempt.topology.batch.global_batch_size
    return Loss(steps=steps, samples=steps * batch, seconds=round(seconds, 2))


def same_losses(trail: Trail, before: Attempt, after: Attempt, tolerance: float) -> Check:
    """Steps that all ranks of both attempts have told: same samples, and losses within a relative tolerance."""
    ledgers = trail.ledgers()
    apart: list[str] = []
    worst, compared = 0.0, 0
    for step in sorted(set(trail.steps(before.seq)) & set(trail.steps(after.seq))):
        old, new = _told(ledgers, before, step), _told(ledgers, after, step)
        if old is None or new is None:
            continue  # the fault came while the ranks were at it
        compared += 1
        if old[0] != new[0]:
            apart.append(f"step {step}: other samples")
        difference = abs(new[1] - old[1]) / max(abs(old[1]), 1e-12)
        worst = max(worst, difference)
        if not difference <= tolerance:
            apart.append(f"step {step}: {old[1]:.8g} and {new[1]:.8g}")
    if apart or not compared:
        return Check(name=_EQUAL, holds=False, seen="; ".join(apart[:5]) or "no step was made twice")
    said = f"{compared} steps, same samples, losses differ by at most {worst:.1e} (allowed {tolerance:.0e})"
    return Check(name=_EQUAL, holds=True, seen=said)


def proofs(entries: Sequence[Entry], trail: Trail, *, newest_picked: bool) -> list[Check]:
    """The audits of journal and ledgers. `newest_picked`: nothing was damaged, so the newest commit must be taken."""
    found = [prove_fenced(entries)]
    if newest_picked:
        found.append(prove_newest_picked(entries))
    try:
        found.append(prove_exactly_once(surviving_history(entries), trail.ledgers(), dataset_size=DATASET))
    except (LedgerError, ValueError) as exc:
        found.append(Proof("each sample exactly once", "", {}, [str(exc)]))
    return [Check(name=p.name, holds=p.holds, seen=p.claim if p.holds else str(p)) for p in found]


def losses(trail: Trail, attempts: Sequence[Attempt]) -> list[tuple[int, int, float]]:
    """(attempt, step, mean loss over the ranks) of everything that was told."""
    ledgers = trail.ledgers()
    return [
        (attempt.attempt, record.step, round(record.loss, 6))
        for attempt in attempts
        for record in ledgers.of_epoch(attempt.seq)
        if record.loss is not None
    ]


def _told(ledgers: Ledgers, attempt: Attempt, step: int) -> tuple[list[int], float] | None:
    """Samples and mean loss of a step, once all ranks of the attempt have told it."""
    record = ledgers.step(attempt.seq, step)
    if record is None or record.loss is None or len(record.lines) != attempt.topology.mesh.world_size:
        return None
    return sorted(sample for line in record.lines.values() for sample in line.samples), record.loss

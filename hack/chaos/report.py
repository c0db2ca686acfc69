"""The tally of a soak for people, and the report for programs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hack.chaos import recovery
from hack.chaos.schedule import Kind
from hack.chaos.soak import Outcome
from trainer_sidecar.contract.journal import Attempt, Manifest, Retired

NAMES = {
    "wrong restore points": ("newest commit picked", "damage never trained from"),
    "lost commits": ("no commit lost", "no zombie commit", "history"),
    "samples twice or missed": (
        "each sample exactly once",
        "samples of the control run",
        "trained to the end",
    ),
    "losses off the control curve": ("loss of the control run",),
}
"""Line of the tally -> the proofs whose contradictions it counts."""


def numbers(outcome: Outcome) -> dict[str, int]:
    """What was seen, summed over the jobs."""
    entries = [entry for evidence in outcome.evidence for entry in evidence.entries]
    attempts = [entry for entry in entries if isinstance(entry, Attempt)]
    found = {
        "attempts": len(attempts),
        "resumes": sum(entry.restore is not None for entry in attempts),
        "commits": sum(isinstance(entry, Manifest) for entry in entries),
        "retired": sum(len(entry.checkpoint_ids) for entry in entries if isinstance(entry, Retired)),
        "whole": _sum(outcome, "no commit lost", "whole"),
        "damaged": _sum(outcome, "damage never trained from", "damaged"),
        "refused": _sum(outcome, "damage never trained from", "refused"),
        "steps": _sum(outcome, "trained to the end", "steps"),
        "samples": _sum(outcome, "each sample exactly once", "samples"),
        "reprocessed": _sum(outcome, "each sample exactly once", "reprocessed"),
    }
    for line, names in NAMES.items():
        proofs = [p for proofs in outcome.proofs.values() for p in proofs if p.name in names]
        found[line] = sum(len(proof.contradictions) for proof in proofs)
    found["stuck"] = len(outcome.stuck)
    return found


def _sum(outcome: Outcome, proof: str, number: str) -> int:
    proofs = [p for proofs in outcome.proofs.values() for p in proofs if p.name == proof]
    return int(sum(p.numbers.get(number, 0) for p in proofs))


def tally(outcome: Outcome, seconds: float) -> str:
    """A page."""
    n, fired = numbers(outcome), outcome.story.fired
    counts = Counter(each.fault.kind for each in fired)
    felt = recovery.by_kind(fired, outcome.evidence)
    lines = [
        f"seed {outcome.schedule.seed}: {len(fired)} of {len(outcome.schedule.faults)} faults fired and proven, "
        f"{len(outcome.proofs)} jobs, {seconds / 60:.1f} minutes",
        f"  {'fault':20} {'times':>5}   seconds until it was over: median / most",
        *(
            f"  {kind:20} {counts[kind]:5}   {recovery.median_and_most(felt.get(kind, []))}"
            for kind in Kind
            if counts[kind]
        ),
        f"  attempts: {n['attempts']}, of them {n['resumes']} resumes",
        f"  commits: {n['commits']}, of them {n['retired']} retired, {n['damaged']} damaged by faults "
        f"({n['refused']} picked and refused); {n['whole']} stand and are whole, every byte",
        f"  steps: {n['steps']}; samples: {n['samples']}, and {n['reprocessed']} reprocessed",
        f"  largest difference of a loss from the control run: {_largest(outcome):.1e}",
        *(f"  {line}: {n[line]}" for line in (*NAMES, "stuck")),
    ]
    return "\n".join([*lines, *(f"  {sentence}" for sentence in outcome.wrong)])


def _largest(outcome: Outcome) -> float:
    found = [p.numbers.get("largest", 0.0) for proofs in outcome.proofs.values() for p in proofs]
    return max(found, default=0.0)


def write(outcome: Outcome, seconds: float, path: Path) -> None:
    """Everything that a program may want to know, as JSON."""
    document: dict[str, Any] = {
        "schedule": outcome.schedule.to_json(),
        "seconds": round(seconds, 1),
        "numbers": numbers(outcome),
        "faults": [
            {**each.to_json(), "seconds": recovery.seconds(each, outcome.evidence)}
            for each in outcome.story.fired
        ],
        "proofs": {
            job: [
                {"name": p.name, "holds": p.holds, "numbers": p.numbers, "contradictions": p.contradictions}
                for p in proofs
            ]
            for job, proofs in outcome.proofs.items()
        },
        "troubles": outcome.story.troubles,
        "good": not outcome.wrong,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")

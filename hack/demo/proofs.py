"""Everything that the demo claims, as proofs over evidence that was collected while it ran."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.demo.settings import EXAMPLE, DemoError
from trainer_sidecar.audit.continuity import prove_learning_rates, prove_resumes
from trainer_sidecar.audit.history import (
    History,
    HistoryError,
    prove_fenced,
    prove_newest_picked,
    surviving_history,
)
from trainer_sidecar.audit.journal import read_entries
from trainer_sidecar.audit.ledger import LedgerError, Ledgers
from trainer_sidecar.audit.losses import loss_curve, prove_same_losses
from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.audit.samples import prove_exactly_once, prove_same_samples
from trainer_sidecar.contract.journal import Attempt, Cause, Entry, UnknownEntryError
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.store.base import Store, StoreError


@dataclass(frozen=True)
class Evidence:
    """What one run left behind: its journal, and what its ranks logged."""

    entries: list[Entry]
    history: History
    ledgers: Ledgers

    @property
    def curve(self) -> dict[int, float]:
        return loss_curve(self.history, self.ledgers)

    @property
    def attempts(self) -> list[Attempt]:
        return self.history.attempts


@dataclass(frozen=True)
class Expected:
    """One attempt of the story that the demo sets out to show."""

    causes: tuple[Cause, ...]
    dp: int
    accumulation: int


def collect(store: Store, keys: RunKeys, ledger: Path) -> Evidence:
    """Read journal and ledgers of a run. Raises DemoError when the store or what it holds contradicts itself."""
    try:
        entries = read_entries(store, keys)
        return Evidence(entries, surviving_history(entries), Ledgers.of_folder(ledger, keys.run_id))
    except (StoreError, UnknownEntryError, HistoryError, LedgerError) as error:
        raise DemoError(f"run {keys.prefix} in {store.url}, ledgers in {ledger}: {error}") from error


def dataset_size() -> int:
    """Samples in the example's dataset, asked of the dataset itself in a process of its own (it imports torch)."""
    code = "from corpus import StandardLibrary; print(len(StandardLibrary()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLE, capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode != 0:
        raise DemoError(f"the example's dataset cannot be opened:\n{done.stderr[-2000:]}")
    return int(done.stdout)


def prove_story(attempts: Sequence[Attempt], story: Sequence[Expected]) -> Proof:
    """The journal's attempts are those that the faults should have caused, with the mesh and batch they should have."""
    differ: list[str] = []
    if len(attempts) != len(story):
        differ.append(f"{len(attempts)} attempts instead of {len(story)}")
    for attempt, expected in zip(attempts, story, strict=False):
        mesh, batch = attempt.topology.mesh, attempt.topology.batch
        if attempt.cause not in expected.causes:
            wanted = " or ".join(expected.causes)
            differ.append(f"attempt {attempt.attempt} has cause {attempt.cause}, expected {wanted}")
        if (mesh.dp, batch.accumulation) != (expected.dp, expected.accumulation):
            differ.append(
                f"attempt {attempt.attempt} ran dp {mesh.dp} with accumulation {batch.accumulation}, "
                f"expected {expected.dp} and {expected.accumulation}"
            )
    shape = " → ".join(f"dp {e.dp} x accumulation {e.accumulation}" for e in story)
    return Proof("attempts", f"{len(attempts)} attempts: {shape}", {"attempts": len(attempts)}, differ)


def prove_all(
    run: Evidence,
    control: Evidence,
    reports: Mapping[int, ResumeReport],
    story: Sequence[Expected],
    *,
    samples: int,
    tolerance: float,
    steps: int,
) -> list[Proof]:
    """Every proof, in the order in which a reader wants them."""
    pair = (run.history, run.ledgers, control.history, control.ledgers)
    return [
        prove_story(run.attempts, story),
        prove_newest_picked(run.entries),
        prove_fenced(run.entries),
        prove_exactly_once(run.history, run.ledgers, dataset_size=samples),
        prove_same_samples(*pair),
        prove_learning_rates(*pair),
        prove_same_losses(run.curve, control.curve, tolerance=tolerance, steps=steps),
        prove_resumes(run.history, reports),
    ]

"""The audit of a soak must fail when it should: what must never happen is made by hand and has to be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hack.chaos import objects
from hack.chaos.audit import Control, Evidence, audit
from hack.chaos.journals import Damage, Journals
from hack.chaos.record import Fired, Hit, Story
from hack.chaos.recovery import by_kind
from hack.chaos.report import numbers, tally
from hack.chaos.schedule import Fault, Kind, Schedule
from hack.chaos.soak import Outcome
from trainer_sidecar.audit.ledger import Ledgers
from trainer_sidecar.contract.journal import (
    Attempt,
    Cause,
    Manifest,
    ObjectRef,
    Owner,
    Quarantined,
    RestorePoint,
    Retired,
    SaveReason,
)
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.ledger import LedgerStep
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.store.memory import MemoryStore

STEPS, BATCH, SAMPLES = 10, 4, 100
DP2 = Topology(
    nodes=2, ranks_per_node=1, mesh=Mesh(dp=2),
    batch=Batch(global_batch_size=BATCH, micro_batch_size=2, accumulation=1),
)  # fmt: skip
CONTROL = Control(
    samples=SAMPLES,
    batches=[list(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS)],
    losses=[5.0 / step for step in range(1, STEPS + 1)],
)


def base(seq: int, epoch: int) -> dict[str, Any]:
    owner = Owner(namespace="default", uid="u1")
    return {
        "seq": seq,
        "epoch": epoch,
        "owner": owner,
        "writer": "x",
        "nonce": f"n{seq}",
        "time": float(10 * seq),
    }


def attempt(seq: int, number: int, restore: Manifest | None = None) -> Attempt:
    point = restore and RestorePoint(
        checkpoint_id=restore.checkpoint_id,
        sequence=restore.seq,
        step=restore.step,
        manifest=restore.manifest,
    )
    cause = Cause.RANK_FAILED if restore else Cause.FIRST
    return Attempt(**base(seq, seq), attempt=number, cause=cause, topology=DP2, restore=point)


def commit(seq: int, epoch: int, step: int) -> Manifest:
    return Manifest(
        **base(seq, epoch), checkpoint_id=f"{step:012d}-{epoch:010d}-{seq:08x}", save_id=f"{seq:064x}", step=step,
        samples=step * BATCH, manifest=ObjectRef(size=10, sha256=f"{seq:064x}"), reason=SaveReason.INTERVAL,
    )  # fmt: skip


def lines(epoch: int, steps: range) -> list[LedgerStep]:
    """What honest ranks log, in seconds that fit the journal's."""
    return [
        LedgerStep(
            attempt=1, epoch=epoch, rank=rank, dp_rank=rank, dp=2, step=step,
            samples=CONTROL.batches[step - 1][2 * rank : 2 * rank + 2], loss=CONTROL.losses[step - 1], lr=0.1,
            time=10.0 * epoch + (step - steps.start) + 1,
        )
        for step in steps
        for rank in range(2)
    ]  # fmt: skip


AT2, AT4, AT6, AT10 = commit(2, 1, 2), commit(3, 1, 4), commit(4, 1, 6), commit(9, 8, 10)
BAD = AT6.checkpoint_id
ENTRIES = [
    attempt(1, 1),
    AT2,
    AT4,
    AT6,
    Retired(**base(5, 1), checkpoint_ids=[AT2.checkpoint_id], reason="old"),
    attempt(6, 2, AT6),
    Quarantined(**base(7, 6), checkpoint_ids=[BAD], fault="bytes", reason="other bytes"),
    attempt(8, 3, AT4),
    AT10,
]
"""Step 6 is committed and damaged; the second attempt picks it and refuses it; the third trains on from step 4."""
LINES = lines(1, range(1, 8)) + lines(8, range(5, 11))
GOOD = Evidence(
    job="chaos-1",
    entries=ENTRIES,
    seen=ENTRIES[:7],
    ledgers=Ledgers(LINES),
    damages=[Damage(BAD, 45.0)],
    problems={AT4.checkpoint_id: "", AT10.checkpoint_id: ""},
)


def failed(evidence: Evidence) -> list[str]:
    return [str(proof) for proof in audit(evidence, CONTROL) if not proof.holds]


def changed(step: int, **update: object) -> Ledgers:
    """The ledgers with other words in the last epoch's line of rank 0 for a step."""
    return Ledgers(
        line.model_copy(update=update) if (line.epoch, line.step, line.rank) == (8, step, 0) else line
        for line in LINES
    )


def without(seq: int) -> list[Any]:
    return [entry for entry in ENTRIES if entry.seq != seq]


def test_a_damaged_checkpoint_that_was_refused_and_steps_that_did_not_survive_are_no_fault() -> None:
    assert failed(GOOD) == []


@pytest.mark.parametrize(
    ("wrong", "proof", "words"),
    [
        (
            lambda: replace(GOOD, ledgers=changed(9, samples=CONTROL.batches[0][:2])),
            "each sample exactly once",
            "sample 0 consumed 2 times in pass 0",
        ),
        (
            lambda: replace(GOOD, ledgers=changed(9, samples=[98, 99])),
            "samples of the control run",
            "step 9 of epoch 8 consumed [98, 99, 34, 35]",
        ),
        (
            lambda: replace(GOOD, ledgers=Ledgers(line for line in LINES if (line.step, line.rank) != (9, 1))),
            "each sample exactly once",
            "logged by ranks 0 of 2",
        ),
        (
            lambda: replace(GOOD, ledgers=changed(9, loss=CONTROL.losses[8] * (1 + 1e-7))),
            "loss of the control run",
            "step 9",
        ),
        (
            lambda: replace(GOOD, entries=ENTRIES[:-1]),
            "trained to the end",
            "it ends at step 4 of 10",
        ),
        (
            lambda: replace(GOOD, problems={**GOOD.problems, AT4.checkpoint_id: "a file is missing"}),
            "no commit lost",
            "a file is missing",
        ),
        (
            lambda: replace(GOOD, problems={AT4.checkpoint_id: ""}),
            "no commit lost",
            "nobody looked at its bytes",
        ),
        (
            lambda: replace(GOOD, entries=without(5)),
            "no commit lost",
            "entry 5 (Retired) was there and is gone now",
        ),
        (
            lambda: replace(GOOD, entries=[*ENTRIES[:7], attempt(8, 3, AT2), AT10]),
            "newest commit picked",
            "attempt 3 picked entry 2, the newest commit was 3",
        ),
        (
            lambda: replace(GOOD, entries=[*ENTRIES[:7], attempt(8, 3), AT10]),
            "history",
            "starts from scratch although commits stand before it",
        ),
        (
            lambda: replace(GOOD, ledgers=Ledgers([*LINES, *lines(6, range(7, 9))])),
            "damage never trained from",
            f"attempt 2 trained 2 steps from {BAD}",
        ),
        (
            lambda: replace(GOOD, damages=[]),
            "damage never trained from",
            f"entry 7 puts {BAD} under quarantine, whose bytes nobody changed",
        ),
        (
            lambda: replace(GOOD, entries=[*ENTRIES, commit(10, 6, 9)]),
            "no zombie commit",
            "behind fence 8",
        ),
    ],
)  # fmt: skip
def test_what_must_never_happen_is_found_and_named(
    wrong: Callable[[], Evidence], proof: str, words: str
) -> None:
    found = [sentence for sentence in failed(wrong()) if sentence.startswith(f"{proof} FAILED")]
    assert len(found) == 1, failed(wrong())
    assert words in found[0]


def test_a_loss_that_differs_by_the_order_of_additions_is_on_the_curve() -> None:
    assert failed(replace(GOOD, ledgers=changed(9, loss=CONTROL.losses[8] * (1 + 1e-13)))) == []


def outcome(evidence: Evidence, *fired: Fired) -> Outcome:
    story = Story(list(fired))
    proofs = {evidence.job: audit(evidence, CONTROL)}
    return Outcome(Schedule(7, tuple(f.fault for f in fired)), story, [evidence], proofs)


def rank_killed(began: float, proven: float) -> Fired:
    return Fired(Fault(1.0, Kind.KILL_RANK, 0), Hit("rank 0", began, proven, "gone", ("chaos-1",)))


def test_a_fault_is_over_with_the_next_commit_or_step_that_it_cannot_have_been_before() -> None:
    sidecar = Fired(Fault(2.0, Kind.KILL_SIDECAR, 0), Hit("sidecar", 46.0, 47.0, "gone", ("chaos-1",)))
    never = rank_killed(200.0, 201.0)
    cut = Fired(Fault(3.0, Kind.CUT_NODE, 0), Hit("node1", 11.5, 14.5, "NotReady", ("chaos-1",)))
    # Epoch 1 steps at 11, 12, ... 17. Epoch 8 begins at 80, its first step ends at 81; the commit stands at 90.
    assert by_kind([rank_killed(11.5, 12.5), rank_killed(46.0, 47.0), sidecar, cut, never], [GOOD]) == {
        Kind.KILL_RANK: [69.5, 35.0],
        Kind.KILL_SIDECAR: [44.0],
        Kind.CUT_NODE: [3.5],
    }


def test_the_tally_counts_what_was_seen_and_what_is_wrong() -> None:
    good = outcome(GOOD, rank_killed(46.0, 47.0))
    assert good.wrong == []
    text = tally(good, 60.0)
    for line in (
        "seed 7: 1 of 1 faults fired and proven, 1 jobs",
        "attempts: 3, of them 2 resumes",
        "commits: 4, of them 1 retired, 1 damaged by faults (1 picked and refused); 2 stand and are whole",
        "wrong restore points: 0",
        "lost commits: 0",
        "samples twice or missed: 0",
        "losses off the control curve: 0",
        "stuck: 0",
    ):
        assert line in text, text
    bad = outcome(replace(GOOD, entries=[*ENTRIES[:7], attempt(8, 3, AT2), AT10]))
    assert numbers(bad)["wrong restore points"] == 1
    assert any("attempt 3 picked entry 2" in sentence for sentence in bad.wrong)


def test_an_entry_that_was_read_while_the_journal_grew_is_kept_for_the_audit() -> None:
    keys = RunKeys("default", "run")
    store = MemoryStore("memory://chaos")
    journals = Journals(store, {"run": keys})
    for entry in ENTRIES:
        store.create(keys.journal(entry.seq), entry.to_bytes())
        assert journals.read_on("run").entries[-1] == entry
    assert [commit.seq for commit in journals.read_on("run").good] == [3, 9]
    journals.damaged("run", AT10.checkpoint_id, 1.0)
    assert [commit.seq for commit in journals.read_on("run").good] == [3]


def test_a_checkpoint_is_damaged_while_it_is_young_and_never_three_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, store = RunKeys("default", "run"), MemoryStore("memory://fresh")
    journals = Journals(store, {"run": keys})
    commits = [commit(seq, 1, seq) for seq in range(2, 7)]

    def fresh(count: int, now: float) -> int | None:
        for entry in [ENTRIES[0], *commits[:count]][len(journals.read_on("run").entries) :]:
            store.create(keys.journal(entry.seq), entry.to_bytes())
        monkeypatch.setattr(objects.time, "time", lambda: now)
        found = objects.newest_young(journals, "run")
        return found.seq if found else None

    assert fresh(2, 31.0) is None, "too few behind it"
    assert fresh(3, 41.0) == 4
    assert fresh(3, 55.0) is None, "too old"
    journals.damaged("run", commits[2].checkpoint_id, 41.0)
    assert fresh(4, 51.0) is None, "the one before it was damaged"
    assert fresh(5, 61.0) == 6

"""The proofs must fail when they should: each contradiction is made by hand and has to be found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_sidecar.audit.continuity import CHECKS, prove_learning_rates, prove_resumes
from trainer_sidecar.audit.history import (
    History,
    HistoryError,
    prove_fenced,
    prove_newest_picked,
    surviving_history,
)
from trainer_sidecar.audit.journal import read_entries
from trainer_sidecar.audit.ledger import LedgerError, Ledgers, read_ledger
from trainer_sidecar.audit.losses import loss_curve, prove_same_losses
from trainer_sidecar.audit.samples import prove_exactly_once, prove_same_samples
from trainer_sidecar.contract.journal import (
    Attempt,
    Cause,
    Entry,
    Manifest,
    ObjectRef,
    Owner,
    Quarantined,
    Reinstated,
    RestorePoint,
    SaveReason,
)
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.ledger import LedgerStep, ledger_name
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.store.memory import MemoryStore

OWNER = Owner(namespace="default", uid="u1")
GLOBAL_BATCH = 8
SIZE = 100
DP4 = Topology(
    nodes=2,
    ranks_per_node=2,
    mesh=Mesh(dp=4),
    batch=Batch(global_batch_size=8, micro_batch_size=2, accumulation=1),
)
DP2 = Topology(
    nodes=1,
    ranks_per_node=2,
    mesh=Mesh(dp=2),
    batch=Batch(global_batch_size=8, micro_batch_size=2, accumulation=2),
)
TP2 = Topology(
    nodes=2,
    ranks_per_node=2,
    mesh=Mesh(dp=2, tp=2),
    batch=Batch(global_batch_size=8, micro_batch_size=2, accumulation=2),
)


def attempt(seq: int, number: int, topology: Topology, restore: Manifest | None = None) -> Attempt:
    point = None
    if restore is not None:
        point = RestorePoint(
            checkpoint_id=restore.checkpoint_id,
            sequence=restore.seq,
            step=restore.step,
            manifest=restore.manifest,
        )
    return Attempt(
        seq=seq, epoch=seq, owner=OWNER, writer="operator/x", nonce=f"n{seq}", time=0.0, attempt=number,
        cause=Cause.FIRST if restore is None else Cause.RANK_FAILED, topology=topology, restore=point,
    )  # fmt: skip


def commit(seq: int, epoch: int, step: int) -> Manifest:
    return Manifest(
        seq=seq, epoch=epoch, owner=OWNER, writer="sidecar/x", nonce=f"n{seq}", time=0.0,
        checkpoint_id=f"{step:012d}-{epoch:010d}-{seq:08x}", save_id=f"{seq:064x}",
        step=step, samples=step * GLOBAL_BATCH,
        manifest=ObjectRef(size=10, sha256=f"{seq:064x}"), reason=SaveReason.INTERVAL,
    )  # fmt: skip


def lines(epoch: int, steps: range, topology: Topology = DP4, size: int = SIZE) -> list[LedgerStep]:
    """What honest ranks log: the data in its natural order, pass after pass."""
    share = GLOBAL_BATCH // topology.mesh.dp
    return [
        LedgerStep(
            attempt=1, epoch=epoch, rank=rank, dp_rank=rank // topology.mesh.tp, dp=topology.mesh.dp, step=step,
            samples=[((step - 1) * GLOBAL_BATCH + rank // topology.mesh.tp * share + k) % size for k in range(share)],
            loss=5.0 / step, grad_norm=1.0, lr=0.1 * step, time=float(step),
        )
        for step in steps
        for rank in range(topology.mesh.world_size)
    ]  # fmt: skip


def with_ids(ledger: list[LedgerStep], ids: list[int]) -> list[LedgerStep]:
    """The ledger with other samples in step 8 of rank 0."""
    return [
        x.model_copy(update={"samples": ids}) if (x.epoch, x.step, x.rank) == (6, 8, 0) else x for x in ledger
    ]


def interrupted_journal() -> list[Entry]:
    """dp 4 to step 4 (6 steps trained), dp 2 from 4 to 7, dp 4 from 7 to 10."""
    first, at4 = attempt(1, 1, DP4), commit(3, 1, 4)
    second, at7 = attempt(4, 2, DP2, at4), commit(5, 4, 7)
    third, at10 = attempt(6, 3, DP4, at7), commit(7, 6, 10)
    return [first, commit(2, 1, 2), at4, second, at7, third, at10]


def interrupted_ledger() -> list[LedgerStep]:
    return lines(1, range(1, 7)) + lines(4, range(5, 8), DP2) + lines(6, range(8, 11))


def control() -> tuple[History, Ledgers]:
    history = surviving_history([attempt(1, 1, DP4), commit(2, 1, 10)])
    return history, Ledgers(lines(1, range(1, 11)))


def test_the_surviving_history_is_what_the_newest_commit_descends_from() -> None:
    history = surviving_history(interrupted_journal())
    assert [(s.epoch, s.start, s.end) for s in history.stretches] == [(1, 0, 4), (4, 4, 7), (6, 7, 10)]
    assert history.last_step == 10
    assert history.stretch_of(5).epoch == 4
    with pytest.raises(KeyError):
        history.stretch_of(11)


def test_an_attempt_without_commits_survives_only_up_to_its_restore_point() -> None:
    history = surviving_history(interrupted_journal()[:-1])
    assert [(s.epoch, s.end) for s in history.stretches] == [(1, 4), (4, 7)]


def test_a_branch_that_was_given_up_is_no_part_of_the_history() -> None:
    journal = interrupted_journal()
    at4 = journal[2]
    assert isinstance(at4, Manifest)
    fallback = attempt(8, 4, DP4, at4)
    history = surviving_history([*journal, fallback, commit(9, 8, 9)])
    assert [(s.epoch, s.start, s.end) for s in history.stretches] == [(1, 0, 4), (8, 4, 9)]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda j: [], "no Attempt"),
        (lambda j: [*j, attempt(8, 4, DP4)], "from scratch"),
        (lambda j: [e for e in j if e.seq != 5], "no earlier commit"),
        (lambda j: [commit(5, 4, 8) if e.seq == 5 else e for e in j], "disagree"),
        (lambda j: [e for e in j if e.seq != 1], "no Attempt entry has"),
    ],
)
def test_a_journal_that_contradicts_itself_is_refused(
    broken: Callable[[list[Entry]], list[Entry]], message: str
) -> None:
    with pytest.raises(HistoryError, match=message):
        surviving_history(broken(interrupted_journal()))


def test_a_commit_behind_a_newer_fence_is_found() -> None:
    assert prove_fenced(interrupted_journal()).holds
    zombie = prove_fenced([*interrupted_journal(), commit(8, 4, 9)])
    assert not zombie.holds
    assert "behind fence 6" in str(zombie)


def test_an_attempt_must_start_from_the_newest_commit_that_no_quarantine_names() -> None:
    at2, at4, at6 = commit(2, 1, 2), commit(3, 1, 4), commit(4, 1, 6)
    at6 = at6.model_copy(update={"parent": at4.checkpoint_id})
    journal: list[Entry] = [attempt(1, 1, DP4), at2, at4, at6, attempt(5, 2, DP4, at6)]
    assert prove_newest_picked(journal).holds
    bytes_of_6 = quarantine(6, at6)
    assert prove_newest_picked([*journal, bytes_of_6, attempt(7, 3, DP4, at4)]).holds
    assert not prove_newest_picked([*journal, bytes_of_6, attempt(7, 3, DP4, at2)]).holds
    assert not prove_newest_picked([*journal, bytes_of_6, attempt(7, 3, DP4, at6)]).holds
    state_of_4 = quarantine(6, at4).model_copy(update={"covers_descendants": True})
    assert prove_newest_picked([*journal, state_of_4, attempt(7, 3, DP4, at2)]).holds
    assert not prove_newest_picked([*journal, quarantine(6, at4), attempt(7, 3, DP4, at2)]).holds


def test_what_a_person_took_back_is_to_be_picked_again_and_children_of_bad_state_are_not() -> None:
    """A commit of ranks that went on from a bad state while it was put under quarantine is as bad, whenever it came."""
    at2, at4 = commit(2, 1, 2), commit(3, 1, 4)
    bad = quarantine(4, at4)
    back = Reinstated(
        seq=5, epoch=5, owner=OWNER, writer="rtj/x", nonce="n5", time=0.0,
        checkpoint_id=at4.checkpoint_id, by="me", reason="the disk was at fault",
    )  # fmt: skip
    journal: list[Entry] = [attempt(1, 1, DP4), at2, at4, bad]
    assert prove_newest_picked([*journal, back, attempt(6, 2, DP4, at4)]).holds
    assert not prove_newest_picked([*journal, back, attempt(6, 2, DP4, at2)]).holds
    state = bad.model_copy(update={"fault": "state", "covers_descendants": True})
    late = commit(5, 1, 6).model_copy(update={"parent": at4.checkpoint_id})
    later = commit(6, 1, 8).model_copy(update={"parent": late.checkpoint_id})
    assert prove_newest_picked([*journal[:3], state, late, later, attempt(7, 2, DP4, at2)]).holds
    assert not prove_newest_picked([*journal[:3], bad, late, later, attempt(7, 2, DP4, at2)]).holds


def quarantine(seq: int, bad: Manifest) -> Quarantined:
    return Quarantined(
        seq=seq, epoch=5, owner=OWNER, writer="operator/x", nonce=f"n{seq}", time=0.0,
        checkpoint_ids=[bad.checkpoint_id], fault="bytes", reason="other bytes",
    )  # fmt: skip


def test_the_journal_is_read_to_its_first_empty_slot_and_a_void_slot_is_skipped() -> None:
    keys = RunKeys("default", "run")
    store = MemoryStore("memory://audit-journal")
    journal = interrupted_journal()
    for entry in journal[:2]:
        store.create(keys.journal(entry.seq), entry.to_bytes())
    store.create(keys.journal(3), b"{ torn")
    store.create(keys.journal(4), commit(4, 1, 3).to_bytes())
    store.create(keys.journal(6), commit(6, 1, 5).to_bytes())
    assert [entry.seq for entry in read_entries(store, keys)] == [1, 2, 4]


def test_each_sample_of_an_interrupted_run_is_found_exactly_once() -> None:
    proof = prove_exactly_once(
        surviving_history(interrupted_journal()), Ledgers(interrupted_ledger()), dataset_size=SIZE
    )
    assert proof.holds, str(proof)
    assert proof.numbers["samples"] == 80
    assert proof.numbers["reprocessed"] == 16


def test_a_run_over_more_than_one_pass_may_cross_the_border_within_a_step() -> None:
    history = surviving_history([attempt(1, 1, DP4), commit(2, 1, 10)])
    assert prove_exactly_once(history, Ledgers(lines(1, range(1, 11), size=30)), dataset_size=30).holds
    skipping = prove_exactly_once(history, Ledgers(lines(1, range(1, 11), size=29)), dataset_size=30)
    assert not skipping.holds
    assert "lacks" in str(skipping)


def test_ranks_that_share_a_dp_rank_count_once() -> None:
    history = surviving_history([attempt(1, 1, TP2), commit(2, 1, 3)])
    ledger = lines(1, range(1, 4), TP2)
    assert prove_exactly_once(history, Ledgers(ledger), dataset_size=SIZE).numbers["samples"] == 24
    ledger[1] = ledger[1].model_copy(update={"samples": [90, 91, 92, 93]})
    assert "saw different samples" in str(prove_exactly_once(history, Ledgers(ledger), dataset_size=SIZE))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda ls: [x for x in ls if x.step != 6 or x.epoch != 4], "step 6 survives in epoch 4, but no rank"),
        (lambda ls: [x for x in ls if (x.epoch, x.step, x.rank) != (6, 9, 3)], "step 9: logged by ranks 0, 1, 2 of 4"),
        (lambda ls: with_ids(ls, [4, 5]), "sample 4 consumed 2 times"),
        (lambda ls: with_ids(ls, [1]), "7 samples, the global batch has 8"),
        (lambda ls: with_ids(ls, [998, 999]), "sample 998 is not in a dataset of 100"),
    ],
)  # fmt: skip
def test_a_lost_or_repeated_sample_is_named(
    tamper: Callable[[list[LedgerStep]], list[LedgerStep]], message: str
) -> None:
    ledgers = Ledgers(tamper(interrupted_ledger()))
    proof = prove_exactly_once(surviving_history(interrupted_journal()), ledgers, dataset_size=SIZE)
    assert not proof.holds
    assert message in str(proof)


def test_the_batches_of_the_run_are_those_of_the_control_run() -> None:
    history = surviving_history(interrupted_journal())
    assert prove_same_samples(history, Ledgers(interrupted_ledger()), *control()).holds
    swapped = [
        x.model_copy(update={"samples": x.samples[::-1]}) if (x.epoch, x.step, x.rank) == (4, 6, 1) else x
        for x in interrupted_ledger()
    ]
    assert "step 6" in str(prove_same_samples(history, Ledgers(swapped), *control()))


def test_losses_are_compared_at_every_step_and_a_missing_one_is_no_success() -> None:
    history = surviving_history(interrupted_journal())
    run = loss_curve(history, Ledgers(interrupted_ledger()))
    reference = loss_curve(*control())
    assert prove_same_losses(run, reference, tolerance=1e-6, steps=10).holds
    assert not prove_same_losses({**run, 7: run[7] * 1.01}, reference, tolerance=1e-3, steps=10).holds
    assert not prove_same_losses({**run, 7: float("nan")}, reference, tolerance=1e-3, steps=10).holds
    del run[5]
    assert "no loss of step 5" in str(prove_same_losses(run, reference, tolerance=1e-3, steps=10))


def test_a_learning_rate_that_was_forgotten_is_found() -> None:
    history = surviving_history(interrupted_journal())
    assert prove_learning_rates(history, Ledgers(interrupted_ledger()), *control()).holds
    forgotten = [x.model_copy(update={"lr": 0.1}) if x.epoch == 4 else x for x in interrupted_ledger()]
    assert not prove_learning_rates(history, Ledgers(forgotten), *control()).holds


def report(epoch: int, checkpoint_id: str, *, failed: str = "", without: str = "") -> ResumeReport:
    return ResumeReport(
        epoch=epoch, attempt=2, checkpoint_id=checkpoint_id, step=4, topology_from=DP4, topology_to=DP2, verified=True,
        checks=[Check(name=n, passed=n != failed, expected=1, found=2) for n in CHECKS if n != without],
    )  # fmt: skip


@pytest.fixture
def resumed() -> tuple[History, dict[int, str]]:
    history = surviving_history(interrupted_journal())
    return history, {s.epoch: s.attempt.restore.checkpoint_id for s in history.stretches if s.attempt.restore}


def test_every_resume_of_the_surviving_history_needs_a_report_that_passed(
    resumed: tuple[History, dict[int, str]],
) -> None:
    history, ids = resumed
    good = {epoch: report(epoch, checkpoint) for epoch, checkpoint in ids.items()}
    assert prove_resumes(history, good).numbers == {"resumes": 2, "checks": 18}
    assert prove_resumes(history, good).holds
    assert "no resume report" in str(prove_resumes(history, {4: good[4]}))


def test_a_resume_with_a_wrong_a_failed_or_a_missing_check_is_no_proof(
    resumed: tuple[History, dict[int, str]],
) -> None:
    history, ids = resumed
    good = {epoch: report(epoch, checkpoint) for epoch, checkpoint in ids.items()}
    told = [
        str(prove_resumes(history, {**good, 6: bad}))
        for bad in (
            report(6, ids[4]),
            report(6, ids[6], failed="learning rates"),
            report(6, ids[6], without="moments"),
            good[6].model_copy(update={"verified": None}),
        )
    ]
    assert "restored" in told[0]
    assert "learning rates: expected 1, found 2" in told[1]
    assert "not checked: moments" in told[2]
    assert "not compared" in told[3]
    assert prove_resumes(
        history, {**good, 6: good[6].model_copy(update={"verified": None})}, compared=False
    ).holds


def test_a_ledger_drops_the_line_that_a_killed_rank_left_unfinished(tmp_path: Path) -> None:
    whole = lines(1, range(1, 3))[:1]
    path = tmp_path / ledger_name("run", 1, 0)
    path.write_text(whole[0].to_json() + "\n" + whole[0].to_json()[:40])
    assert [line.step for line in read_ledger(path)] == [1]
    assert Ledgers.of_folder(tmp_path, "run").epochs == [1]


def test_a_broken_line_in_the_middle_or_a_step_written_twice_is_refused(tmp_path: Path) -> None:
    line = lines(1, range(1, 2))[0]
    path = tmp_path / ledger_name("run", 1, 0)
    path.write_text("[]\n" + line.to_json() + "\n")
    with pytest.raises(LedgerError, match="line 1"):
        list(read_ledger(path))
    with pytest.raises(LedgerError, match="twice"):
        Ledgers([line, line])

"""The whole embedded way with a real training: killed twice with everything below it, it resumes, on both stores.

Samples and losses are taken from what the ranks logged, never from a plan.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainer_sidecar import cli
from trainer_sidecar.contract.journal import Quarantined
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.ledger import LedgerStep
from trainer_sidecar.store.base import NotFoundError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "tiny_training.py"
STEPS = 40
OPTIONS = (
    "--nproc",
    "2",
    "--global-batch",
    "8",
    "--max-micro-batch",
    "2",
    "--interval-steps",
    "4",
    "--run-id",
    "tiny",
)


def history(store: str) -> History:
    return Journal(open_store(store), RunKeys("local", "tiny")).read()


def surviving(ledger: Path, journal: History) -> dict[int, list[LedgerStep]]:
    """Step -> what each rank logged of it, in the history that was built upon."""
    starts = [(a.seq, a.restore.step if a.restore else 0) for a in journal.attempts]
    ends = [start for _, start in starts[1:]] + [STEPS]
    steps: dict[int, list[LedgerStep]] = {}
    for (epoch, start), end in zip(starts, ends, strict=True):
        for path in ledger.glob(f"tiny-e{epoch}-r*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    raw = json.loads(line)
                except ValueError:
                    continue  # the unfinished last line of a killed process
                if raw.get("kind") == "step" and start < raw["step"] <= end:
                    steps.setdefault(raw["step"], []).append(LedgerStep.model_validate(raw))
    return steps


def losses(steps: dict[int, list[LedgerStep]]) -> list[float]:
    return [sum(s.loss or 0.0 for s in steps[n]) / len(steps[n]) for n in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def control_losses() -> list[float]:
    """Losses of the uninterrupted run, by one; filled by the first test that finishes one."""
    return []


def test_killed_twice_with_all_its_processes_it_resumes_and_repeats_nothing(
    start_run: Any, store_url: str, tmp_path: Path, control_losses: list[float]
) -> None:
    ledger = tmp_path / "ledger"
    options = (*OPTIONS, "--ledger", str(ledger))
    for kills in (1, 2):
        run = start_run(store_url, SCRIPT, str(STEPS), "0.3", options=options)
        started = run.until_event("AttemptStarted")[0]
        assert (started["restore"] is None) == (kills == 1), started
        run.until_event("Committed")
        run.kill_all()
    run = start_run(store_url, SCRIPT, str(STEPS), "0", options=options)
    assert run.wait(180) == 0, run.text()

    journal = history(store_url)
    restores = [a.restore.step if a.restore else 0 for a in journal.attempts]
    assert len(restores) == 3
    assert 0 < restores[1] < restores[2] < STEPS
    assert journal.lineage[0].step == STEPS, "the last step is committed when the run ends"
    resume = run.events("Resume")
    assert resume, run.text()
    assert all(check["passed"] for check in resume[-1]["checks"]), resume[-1]

    again = start_run(store_url, SCRIPT, str(STEPS), "0", options=options)
    assert again.wait() == 0, again.text()
    assert f"the same command finished at step {STEPS}" in again.events("Complete")[0]["message"]
    assert not again.events("AttemptStarted"), "nothing is started to find out that there is nothing to do"
    assert history(store_url).tail == journal.tail

    steps = surviving(ledger, journal)
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert all(sorted(s.rank for s in steps[n]) == [0, 1] for n in steps)
    taken = Counter(i for n in steps for s in steps[n] for i in s.samples)
    assert sum(taken.values()) == STEPS * 8
    assert set(taken.values()) == {1}, "a sample was lost or repeated"

    if not control_losses:
        control_losses += control(start_run, tmp_path)
    assert losses(steps) == pytest.approx(control_losses, rel=1e-6)


def control(start_run: Any, tmp_path: Path) -> list[float]:
    store, ledger = f"file://{tmp_path}/control", tmp_path / "control-ledger"
    run = start_run(store, SCRIPT, str(STEPS), "0", options=(*OPTIONS, "--ledger", str(ledger)))
    assert run.wait(180) == 0, run.text()
    return losses(surviving(ledger, history(store)))


def test_ctrl_c_saves_at_the_next_step_and_the_tables_show_it(
    start_run: Any, file_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start_run(
        file_url, SCRIPT, "10000", "0.05", options=(*OPTIONS, "--nproc", "1", "--interval-steps", "0")
    )
    run.until_text("rank 0 trains from step 0")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(120) == 143, run.text()
    outcome = run.events("AttemptEnded")[0]["outcome"]
    assert outcome["kind"] == "SavedAndStopped", run.text()

    journal = history(file_url)
    (commit,) = journal.manifests.values()
    assert (commit.step, commit.reason) == (outcome["step"], "Order")
    where = ["--store", file_url, "--run-id", "tiny"]
    assert cli.main(["checkpoints", "list", *where]) == 0
    assert "resume point" in capsys.readouterr().out
    assert cli.main(["checkpoints", "show", "newest", *where, "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["progress"]["step"] == commit.step
    assert cli.main(["journal", "tail", *where]) == 0
    assert f"step {commit.step} committed [Order]" in capsys.readouterr().out


def flip_a_byte(root: Path, checkpoint: str, rank: int) -> None:
    path = root / RunKeys("local", "tiny").shard(checkpoint, rank)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_quarantines_the_newest_and_resumes_from_the_one_before(
    start_run: Any, file_url: str, tmp_path: Path
) -> None:
    run = start_run(file_url, SCRIPT, "12", "0", options=OPTIONS)
    assert run.wait(180) == 0, run.text()
    before = history(file_url)
    newest, older = before.lineage[0], before.lineage[1]
    flip_a_byte(tmp_path / "store", newest.checkpoint_id, 1)

    run = start_run(file_url, SCRIPT, "16", "0", options=OPTIONS)
    assert run.wait(180) == 0, run.text()
    starts = [e["restore"]["checkpointId"] for e in run.events("AttemptStarted")]
    assert starts == [newest.checkpoint_id, older.checkpoint_id]
    assert len(run.events("Quarantined")) == 1
    after = history(file_url)
    (entry,) = [e for e in after.entries if isinstance(e, Quarantined)]
    assert (entry.checkpoint_ids, entry.fault, entry.file) == (
        [newest.checkpoint_id],
        "bytes",
        "rank-00001.distcp",
    )
    assert entry.detail["reads"] == 2
    assert entry.writer.startswith("rtj run/")
    assert after.lineage[0].step == 16
    assert newest not in after.lineage

    for left in after.lineage:
        flip_a_byte(
            tmp_path / "store", left.checkpoint_id, 0
        ) if left.checkpoint_id not in after.retired else None
    run = start_run(file_url, SCRIPT, "20", "0", options=OPTIONS)
    assert run.wait(180) == 1, run.text()
    assert "it does not start from scratch" in run.text()


def test_a_fork_starts_from_another_runs_checkpoint_which_it_holds(start_run: Any, file_url: str) -> None:
    run = start_run(file_url, SCRIPT, "12", "0", "8", options=OPTIONS)
    assert run.wait(180) == 0, run.text()
    base = history(file_url)
    outcome = run.events("AttemptEnded")[0]["outcome"]
    assert (outcome["kind"], outcome["step"], outcome["endReached"]) == ("Finished", 8, False)
    with pytest.raises(NotFoundError):  # the same command trains on
        open_store(file_url).get(RunKeys("local", "tiny").finished)
    chosen = base.lineage[1]

    source = f"tiny/{chosen.checkpoint_id}"
    run = start_run(
        file_url, SCRIPT, "12", "0", options=(*OPTIONS, "--run-id", "fork", "--resume-from", source)
    )
    assert run.wait(180) == 0, run.text()
    (started,) = run.events("AttemptStarted")
    assert started["restore"]["checkpointId"] == chosen.checkpoint_id
    assert started["restore"]["source"] == {"namespace": "local", "runId": "tiny"}
    assert all(check["passed"] for check in run.events("Resume")[-1]["checks"])
    fork = Journal(open_store(file_url), RunKeys("local", "fork")).read()
    assert fork.lineage[0].step == 12
    assert history(file_url).holds == {chosen.checkpoint_id: frozenset({"run local/fork"})}
    assert history(file_url).lineage == base.lineage, "the source's own history is as it was"


def test_another_batch_is_said_and_another_model_is_refused_with_what_to_do(
    start_run: Any, file_url: str, tmp_path: Path
) -> None:
    alone = (*OPTIONS, "--nproc", "1")
    run = start_run(file_url, SCRIPT, "4", "0", options=alone)
    assert run.wait(180) == 0, run.text()
    run = start_run(file_url, SCRIPT, "4", "0", options=(*alone, "--again", "--global-batch", "16"))
    assert run.wait(180) == 0, run.text()
    (said,) = run.events("BatchChanged")
    assert said["message"].startswith("16 samples a step from here on, until now 8")

    other = tmp_path / "other.py"
    other.write_text(SCRIPT.read_text().replace("32", "16"))
    run = start_run(file_url, other, "4", "0", options=alone)
    assert run.wait(180) == 78, run.text()
    assert not run.events("BatchChanged")
    assert "begin a new run with --run-id" in run.events("Refused")[0]["message"]
    assert "ResumeRefused, the reasons stand below" in run.text()
    assert "Traceback" not in run.text()
    assert "on 1 rank, dp1" in run.text()

"""A resume that was refused: `rtj run` tells what may pass from what does not fit, as the operator does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.restore_fault import Evidence, Refusal, kind_of_refusal
from trainer_sidecar.run.ended import ended_by
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

AWAY = "StoreUnavailable: BucketMissing: file:///ckpt does not exist: mount or create it (checkpoint x)"
FULL = "Internal: the shared volume failed: [Errno 28] No space left on device (checkpoint x)"
SCRIPT = """
import json, os, sys
plan = json.load(open(os.environ["RTJ_PLAN"]))
said, store = sys.argv[1:3]
if plan["attempt"] < 3:
    if plan["attempt"] == 1 and store:
        os.rename(store, store + ".away")
    told = {"epoch": plan["epoch"], "attempt": plan["attempt"], "kind": "ResumeRefused", "step": 0, "message": said}
    with open(os.path.join(os.environ["RTJ_OUTCOME_DIR"], "rank-00000.json"), "w") as file:
        json.dump(told, file)
    sys.exit(1)
"""
"""What a Session tells of a refusal, without torch."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def causes(url: str) -> list[Cause]:
    return [a.cause for a in Journal(open_store(url), RunKeys("local", "train")).read().attempts]


@pytest.mark.torchrun
def test_a_store_folder_that_is_away_while_a_restore_reads_is_waited_for_and_the_restore_tried_again(
    start_run: Any, script: Path, tmp_path: Path, file_url: str
) -> None:
    options = ("--nproc", "1", "--max-restarts", "2", "--backoff-seconds", "0")
    run = start_run(file_url, script, AWAY, str(tmp_path / "store"), options=options)
    run.until_event("StoreAway")
    assert run.process.poll() is None
    (tmp_path / "store.away").rename(tmp_path / "store")
    assert run.wait() == 0, run.text()
    assert run.events("StoreBack")
    assert causes(file_url) == [Cause.FIRST, Cause.OPERATOR, Cause.OPERATOR]
    assert not run.events("Refused")


@pytest.mark.torchrun
def test_after_the_restarts_the_last_words_name_the_store_and_the_script_is_not_blamed(
    start_run: Any, script: Path, file_url: str
) -> None:
    options = ("--nproc", "1", "--max-restarts", "1", "--backoff-seconds", "0")
    run = start_run(file_url, script, AWAY, "", options=options)
    assert run.wait() == 69, run.text()
    assert causes(file_url) == [Cause.FIRST, Cause.OPERATOR]
    (told,) = run.events("Refused")
    assert told["message"].startswith(f"{file_url} could not be read")
    assert f"rtj store probe --store {file_url}" in told["message"]
    assert "2 failures in a row" in run.events("GaveUp")[0]["message"]


@pytest.mark.torchrun
def test_ctrl_c_ends_the_wait_for_a_folder_that_does_not_come_back(
    start_run: Any, script: Path, tmp_path: Path, file_url: str
) -> None:
    run = start_run(file_url, script, AWAY, str(tmp_path / "store"), options=("--nproc", "1"))
    run.until_event("StoreAway")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 143, run.text()


@pytest.mark.parametrize(
    ("message", "kind", "code", "retry"),
    [
        (AWAY, Refusal.STORE_AWAY, 69, True),
        (f"pod p-0: {AWAY}", Refusal.STORE_AWAY, 69, True),
        (FULL, Refusal.PASSING, 1, True),
        (
            "WrongEpoch: the restore point was closed: a newer plan came (checkpoint x)",
            Refusal.PASSING,
            1,
            True,
        ),
        ("BadRequest: the plan's restore point is none, not x (checkpoint x)", Refusal.PASSING, 1, True),
        (f"NotFound: {Evidence('k/x/f', 'an object', 'nothing', 2)}", Refusal.POINT_BAD, 78, False),
        ("model/w: shape [2] in the checkpoint, [3] in this run", Refusal.UNFIT, 78, False),
        ("Internals: named by a user", Refusal.UNFIT, 78, False),
        ("fingerprint tokenizer\nInternal: not the first line", Refusal.UNFIT, 78, False),
    ],
)
def test_what_a_refusal_says_decides_code_and_restart(
    message: str, kind: Refusal, code: int, retry: bool
) -> None:
    outcome = Outcome(epoch=1, attempt=1, kind=OutcomeKind.RESUME_REFUSED, message=message)
    ended = ended_by(outcome, stopped=False)
    assert (kind_of_refusal(message), ended.exit_code, ended.retry) == (kind, code, retry)
    assert ("run the script that they fit" in ended.advice("s3://b")) == (code == 78)
    assert not ended_by(outcome, stopped=True).retry

"""`rtj run` around scripts that know nothing of checkpoints: attempts, budget, orders, fences, clean ends."""

from __future__ import annotations

import json
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from trainer_sidecar import cli
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.launch import descendants
from trainer_sidecar.run.local_plan import LocalMesh, RunSettings
from trainer_sidecar.run.local_volume import LocalVolume, memory_folder, remove_abandoned
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

pytestmark = pytest.mark.torchrun

SCRIPT = """
import json, os, sys, time
rank, attempt = os.environ["RANK"], json.load(open(os.environ["RTJ_PLAN"]))["attempt"]
print(f"rank {rank} in attempt {attempt}", flush=True)
mode = sys.argv[1]
if mode == "usage":
    import argparse
    argparse.ArgumentParser().parse_args(["--bogus"])
if mode == "sleep":
    time.sleep(300)
if mode == "fail" or (mode == "fail once" and attempt == 1 and rank == "1"):
    raise RuntimeError("this one fails")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my train.py"
    path.write_text(SCRIPT)
    return path


def attempts(store: str, run_id: str = "my-train") -> list[tuple[int, Cause]]:
    history = Journal(open_store(store), RunKeys("local", run_id)).read()
    return [(a.attempt, a.cause) for a in history.attempts]


def test_a_failed_rank_starts_a_new_attempt_at_once_and_the_run_finishes(
    start_run: Any, script: Path, file_url: str
) -> None:
    run = start_run(file_url, script, "fail once", options=("--nproc", "2", "--global-batch", "4"))
    assert run.wait() == 0, run.text()
    assert attempts(file_url) == [(1, Cause.FIRST), (2, Cause.RANK_FAILED)]
    started = run.events("AttemptStarted")
    assert started[0]["topology"]["batch"] == {"globalBatchSize": 4, "microBatchSize": 2, "accumulation": 1}
    assert started[1]["seconds"] - run.events("AttemptEnded")[0]["seconds"] < 2, (
        "no backoff on the first failure"
    )
    assert run.events("AttemptEnded")[0]["outcome"]["failure"]["rank"] == 1
    assert "rank 0 in attempt 2" in run.text()
    (said,) = run.events("NothingCommitted")
    assert "nothing was committed: the script ended well and has made no session" in said["message"]
    assert "ChildFailedError" not in run.text(), "torchrun's own traceback hides the script's"
    assert not list(memory_folder().glob(f"rtj-run-{os.getuid()}-*{run.process.pid}*"))


def test_the_budget_of_failures_without_a_commit_ends_the_run(
    start_run: Any, script: Path, file_url: str
) -> None:
    options = ("--nproc", "2", "--max-restarts", "1", "--backoff-seconds", "0")
    run = start_run(file_url, script, "fail", options=options)
    assert run.wait() == 1
    assert len(attempts(file_url)) == 2
    assert "2 failures in a row without a newer commit" in run.events("GaveUp")[0]["message"]


def test_arguments_that_the_script_refuses_are_no_failure_to_retry(
    start_run: Any, script: Path, file_url: str
) -> None:
    run = start_run(file_url, script, "usage", options=("--nproc", "1", "--backoff-seconds", "0"))
    assert run.wait() == 2, run.text()
    assert len(attempts(file_url)) == 1
    assert "correct what stands after --" in run.events("UsageError")[0]["message"]
    assert not run.events("GaveUp")


def test_a_second_run_fences_the_first_which_kills_its_ranks_and_says_so(
    start_run: Any, script: Path, file_url: str
) -> None:
    first = start_run(file_url, script, "sleep", options=("--nproc", "1"))
    first.until_text("rank 0 in attempt 1")
    second = start_run(file_url, script, "sleep", options=("--nproc", "1"))
    second.until_event("AttemptStarted")
    assert first.wait(20) == 143
    ended = first.events("AttemptEnded")[0]
    assert ended["outcome"]["kind"] == "Fenced"
    assert "attempt 2 by rtj run/" in ended["message"]
    assert attempts(file_url) == [(1, Cause.FIRST), (2, Cause.RESUMED)]

    second.until_text("rank 0 in attempt 2")
    second.kill_all()  # SIGKILL of `rtj run` alone leaves no process, and its memory is given back by the next one
    assert remove_abandoned(memory_folder())


def test_ctrl_c_orders_a_save_and_a_second_one_stops(start_run: Any, script: Path, file_url: str) -> None:
    run = start_run(file_url, script, "sleep", options=("--nproc", "1"))
    run.until_text("rank 0 in attempt 1")
    run.process.send_signal(signal.SIGINT)
    run.until_event("Saving")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == 143
    assert run.events("AttemptEnded")[0]["outcome"]["kind"] == "Stopped"


def test_what_cannot_run_is_refused_in_one_line_before_any_process_starts(
    tmp_path: Path, file_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = __file__
    cases = [
        (["run", "--store", file_url], 2, "nothing to run"),
        (["run", "--", "train.py"], 2, "no store"),
        (["run", "--store", "ftp://x", "--", here], 2, "not a store URL"),
        (["run", "--store", "file:///proc/none", "--", here], 69, "/proc/none"),
        (
            ["run", "--store", file_url, "--nproc", "3", "--tp", "2", "--", here],
            2,
            "cannot be divided by tp 2",
        ),
        (
            ["run", "--store", file_url, "--nproc", "3", "--global-batch", "4", "--", here],
            2,
            "--nproc 2 or 4 would work",
        ),
        (["run", "--store", file_url, "--run-id", "../x", "--", here], 2, "cannot be part of a store key"),
        (["plan", "-f", str(tmp_path / "none.yaml")], 2, "cannot be read"),
    ]
    before = set(descendants(os.getpid()))  # servers of other tests
    for arguments, code, words in cases:
        assert cli.main(arguments) == code, arguments
        assert words in capsys.readouterr().err, arguments
    assert set(descendants(os.getpid())) <= before


def test_a_plan_is_printed_for_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "apiVersion: resumabletraining.io/v1alpha1\nkind: ResumableTrainingJob\nmetadata: {name: sft}\n"
        "spec:\n  nodes: 4\n  elastic: {minNodes: 2}\n  batch: {globalBatchSize: 512}\n"
        "  checkpoint: {store: {url: s3://ckpt/team-a}}\n"
        "  template: {spec: {containers: [{name: trainer, image: i, command: [train.py],"
        " resources: {limits: {nvidia.com/gpu: 8}}}]}}\n"
    )
    assert cli.main(["plan", "-f", str(job), "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["nodes"], row["micro"], row["accumulation"]) for row in rows] == [
        (2, 16, 2),
        (3, None, None),
        (4, 16, 1),
    ]
    assert "does not divide" in rows[1]["note"]
    assert cli.main(["plan", "-f", str(job)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["NODES", "RANKS", "MESH"]

    written = job.read_text()

    def refused(old: str, new: str) -> str:
        job.write_text(written.replace(old, new))
        assert cli.main(["plan", "-f", str(job)]) == 2
        out, said = capsys.readouterr()
        assert not ("NODES" in out and "the API server would refuse it" in said), (
            "no table of what is not stored"
        )
        return str(said)

    assert "unknown field spec.elastic.minNode\n" in refused("minNodes", "minNode")
    assert "must hold a container named trainer" in refused("name: trainer", "name: main")
    assert "spec.checkpoint.store.url: store.url must be s3://bucket" in refused("s3://ckpt", "file:///ckpt")
    assert "metadata.name must start with a letter" in refused("name: sft", "name: 7b")
    assert "spec.batch.globalBatchSize: Input should be a valid integer" in refused("512", '"512"')
    assert "nodes 4 is below elastic.minNodes 5: raise" in refused("minNodes: 2", "minNodes: 5")
    assert "write command: [train.py]" in refused("command: [train.py]", "command: [python, train.py]")
    assert "change batch.globalBatchSize" in refused("nodes: 4", "nodes: 3")
    assert "is a drill" in refused("kind: ResumableTrainingJob", "kind: ResumeDrill")


def test_the_folder_of_a_living_run_is_never_taken_for_an_abandoned_one(tmp_path: Path) -> None:
    living = LocalVolume(tmp_path)
    assert living.why_full() == ""
    assert f"; {tmp_path} has " in living.why_full(needed=1 << 62)
    assert remove_abandoned(tmp_path) == []
    living.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_was_moved_goes_on_and_a_run_of_a_cluster_is_not_taken(
    start_run: Any, script: Path, tmp_path: Path
) -> None:
    first = start_run(f"file://{tmp_path}/old", script, "finish")
    assert first.wait() == 0, first.text()
    (tmp_path / "old").rename(tmp_path / "new")
    second = start_run(f"file://{tmp_path}/new", script, "finish")
    assert second.wait() == 0, second.text()
    assert [number for number, _ in attempts(f"file://{tmp_path}/new")] == [1, 2]

    history = Journal(open_store(f"file://{tmp_path}/new"), RunKeys("local", "my-train")).read()
    mine = history.owner
    assert mine is not None
    elsewhere = RunSettings(["my train.py"], f"file://{tmp_path}/other", "my-train", LocalMesh(1))
    assert elsewhere.owner.uid != mine.uid
    assert elsewhere.may_be(mine)
    assert not elsewhere.may_be(mine.model_copy(update={"cluster": "prod"}))
    assert not elsewhere.may_be(mine.model_copy(update={"uid": str(uuid.uuid4())})), "an object of a cluster"

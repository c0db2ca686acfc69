"""Options of `rtj run`, as the run's settings: what stays of the checkpoints, and where a fork starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from trainer_sidecar.cli import build_parser, main
from trainer_sidecar.commands.run import settings_of
from trainer_sidecar.contract.plan import AccumulationSave, OnVerificationFailure, Retention
from trainer_sidecar.run.local_plan import LocalMesh, MeshRefusedError, RunSettings
from trainer_sidecar.store.forks import Fork


def settings(*options: str) -> RunSettings:
    return settings_of(build_parser().parse_args(["run", "--store", "file:///x", *options, "--", "train.py"]))


def test_retention_is_on_by_default_and_options_change_it() -> None:
    assert settings().checkpoint.retention == Retention(keep_last=3, keep_every_steps=0)
    chosen = settings("--keep-last", "5", "--keep-every-steps", "1000").checkpoint.retention
    assert chosen == Retention(keep_last=5, keep_every_steps=1000)


def test_keeping_less_than_two_is_refused() -> None:
    with pytest.raises(ValueError, match="--keep-last 1 is below 2"):
        settings("--keep-last", "1")


def test_a_fork_names_a_run_and_maybe_its_checkpoint() -> None:
    assert settings().fork is None
    assert settings("--resume-from", "base").fork == Fork("local", "base")
    one = "000000000005-0000000001-0123abcd"
    assert settings("--resume-from", f"base/{one}").fork == Fork("local", "base", one)
    for wrong in ("../x", "base/newest"):
        with pytest.raises(ValueError, match=r"cannot be part of a store key|is not a checkpoint id"):
            settings("--resume-from", wrong)


def test_a_jobs_retention_travels_in_its_plan() -> None:
    checkpoint = {"store": {"url": "s3://bucket/x"}, "retention": {"keepLast": 4, "keepEverySteps": 50}}
    container = {"name": "trainer", "image": "x", "command": ["train.py"]}
    job = parse_job(
        {
            "metadata": {"name": "sft", "namespace": "ns", "uid": "u", "generation": 1},
            "spec": {
                "nodes": 1,
                "batch": {"globalBatchSize": 1},
                "checkpoint": checkpoint,
                "template": {"spec": {"containers": [container]}},
            },
        }
    )
    assert effective(job, OperatorDefaults()).checkpoint.retention == Retention(
        keep_last=4, keep_every_steps=50
    )


def test_a_number_of_ranks_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(MeshRefusedError, match=r"globalBatchSize 32; --nproc 2 or 4 would work$"):
        LocalMesh(ranks=3, global_batch=32).topology(None, None)
    with pytest.raises(MeshRefusedError, match=r"cannot be divided by tp 4 .*; --nproc 4 or 8 would work$"):
        LocalMesh(ranks=6, tp=4, global_batch=32).topology(None, None)
    with pytest.raises(MeshRefusedError, match=r"; no --nproc near it works$"):
        LocalMesh(ranks=3, tp=7, global_batch=32).topology(None, None)


def test_a_script_that_is_not_there_is_no_failure_to_retry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (f"{tmp_path}/none.py", "python"):
        assert main(["run", "--store", f"file://{tmp_path}/store", "--", name, "train.py"]) == 2
        assert f"no script {name} on this machine" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_what_a_resume_may_change_and_what_follows_a_failed_one() -> None:
    found = settings(
        "--accept", "training.*", "--accept", "model.use_cache", "--accumulation-save", "reduced"
    )
    assert found.fingerprints.accept == ["training.*", "model.use_cache"]
    assert found.checkpoint.accumulation_save is AccumulationSave.REDUCED
    assert found.checkpoint.grace_seconds is None  # nobody kills
    assert settings().verification.on_failure is OnVerificationFailure.FALL_BACK
    warned = settings("--on-verification-failure", "Warn", "--max-failed-saves", "2")
    assert warned.verification.on_failure is OnVerificationFailure.WARN
    assert warned.checkpoint.max_failed_saves == 2


def test_batch_and_micro_batch_of_the_checkpoint_are_kept_so_that_fewer_ranks_need_no_more_memory() -> None:
    saved = LocalMesh(ranks=2, global_batch=32, max_micro_batch=4).topology(None, None)
    resumed = LocalMesh(ranks=1).topology(None, saved).batch
    assert (resumed.global_batch_size, resumed.micro_batch_size, resumed.accumulation) == (32, 4, 8)
    wider = LocalMesh(ranks=1, max_micro_batch=16).topology(None, saved).batch
    assert (wider.micro_batch_size, wider.accumulation) == (16, 2)

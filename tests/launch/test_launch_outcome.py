"""How the launcher makes one outcome of many ranks. Values in, values out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_sidecar import launch
from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.outcome import EXIT_CODES, Outcome, OutcomeKind
from trainer_sidecar.contract.plan import STACKS_SIGNAL
from trainer_sidecar.train.errors import ResumeRefused
from trainer_sidecar.train.outcome import OutcomeFile

PLAN = {"epoch": 5, "attempt": 2, "topology": {"nodes": 1, "ranksPerNode": 3}}


def death(code: int, ended: float = 10.0, error: str = "", well: bool | None = None) -> dict[str, Any]:
    return {"code": code, "ended": ended, "error": error, "well": code == 0 if well is None else well}


def file(kind: str, written: float = 10.0, **more: Any) -> dict[str, Any]:
    return {"epoch": 5, "attempt": 2, "kind": kind, "written": written, **more}


def merge(deaths: dict[int, Any], files: dict[int, Any] | None = None, **more: Any) -> Outcome:
    return Outcome.model_validate(launch.merge_outcome(PLAN, deaths, files or {}, **more))


def test_the_launcher_repeats_the_contract_word_for_word() -> None:
    assert launch.CONTRACT_VERSION == CONTRACT_VERSION
    assert launch.STACKS_SIGNAL == STACKS_SIGNAL
    assert list(launch.MERGE_ORDER) == [kind.value for kind in OutcomeKind]
    assert {k.value: code for k, code in EXIT_CODES.items()} == launch.EXIT_CODES


def test_bytes_that_are_no_text_reach_the_outcome_in_a_form_that_everybody_reads(tmp_path: Path) -> None:
    """The name of a file in an error can hold them (PEP 383)."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "no file 'a\udcff'"}}))
    error = launch.elastic_error(str(path))
    assert error == "no file 'a\\udcff'"
    Outcome.model_validate_json(
        launch.bounded_json({"epoch": 1, "attempt": 1, "kind": "Failed", "message": error})
    )

    plan: Any = SimpleNamespace(epoch=1, attempt=1)
    OutcomeFile(tmp_path, plan, 0).failed(FileNotFoundError("a\udcff"), 3)
    written = Outcome.model_validate_json((tmp_path / "rank-00000.json").read_bytes())
    assert written.message == "FileNotFoundError at step 3: a\\udcff"


def test_a_rank_that_is_killed_after_a_refusal_that_its_script_has_caught_was_not_refused(
    tmp_path: Path,
) -> None:
    """A second session, with consent, is what a refusal asks for: until it ends, its rank has no outcome."""
    plan: Any = SimpleNamespace(epoch=5, attempt=2)
    OutcomeFile(tmp_path, plan, 0).failed(ResumeRefused(["fingerprint training.lr: 1, 2 in this run"]), 0)
    path = launch.rank_file(str(tmp_path), 0)
    assert launch.read_json(path)["kind"] == "ResumeRefused"
    OutcomeFile(tmp_path, plan, 0)
    assert not Path(path).exists()
    well = launch.ended_well(str(tmp_path), 0, -9, None)
    merged = merge({0: death(-9, well=well)})
    assert (merged.kind, merged.failure and merged.failure.signal) == (OutcomeKind.FAILED, "SIGKILL")


def test_the_first_rank_to_die_is_blamed() -> None:
    merged = merge(
        {0: death(1, 10.2, "reset by peer"), 2: death(1, 10.0, "ValueError: bad"), 1: death(1, 10.1)}
    )
    assert merged.failure is not None
    assert merged.failure.rank == 2
    assert merged.message == "rank 2 exited with code 1: ValueError: bad"


def test_a_rank_killed_by_a_signal_is_blamed_before_a_peer_that_told_faster() -> None:
    merged = merge({0: death(1, 10.0, "reset by peer"), 1: death(-9, 10.3)})
    assert merged.failure is not None
    assert (merged.failure.rank, merged.failure.signal) == (1, "SIGKILL")
    assert merged.message == "rank 1 was killed by SIGKILL"


def test_an_abort_of_the_watchdog_is_not_taken_for_a_cause() -> None:
    merged = merge({0: death(1, 10.0, "Error: own"), 1: death(-6, 10.2)})
    assert merged.failure is not None
    assert merged.failure.rank == 0


def test_the_time_of_the_outcome_file_counts_not_the_slow_exit_after_it() -> None:
    files = {2: file("Failed", 10.0, message="NaN in step 3")}
    merged = merge({0: death(1, 10.4), 2: death(1, 11.9)}, files)
    assert merged.failure is not None
    assert (merged.failure.rank, merged.message) == (2, "NaN in step 3")


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["Finished", "Finished", "Finished"], "Finished"),
        (["SavedAndStopped", "Finished", "SavedAndStopped"], "SavedAndStopped"),
        (["Failed", "ResumeRefused", "Failed"], "ResumeRefused"),
        (["Fenced", "Failed", "Fenced"], "Failed"),
        (["Fenced", "Finished", "Fenced"], "Fenced"),
    ],
)
def test_kinds_merge_in_the_order_of_the_contract(kinds: list[str], expected: str) -> None:
    files = {rank: file(kind, message=kind) for rank, kind in enumerate(kinds)}
    deaths = {rank: death(0 if kind in launch.GOOD else 1) for rank, kind in enumerate(kinds)}
    assert merge(deaths, files).kind == expected


def test_the_end_is_reached_when_every_rank_says_so() -> None:
    deaths = {rank: death(0) for rank in range(3)}
    files = {rank: file("Finished", endReached=True) for rank in range(3)}
    assert merge(deaths, files).end_reached
    assert not merge(deaths, files | {1: file("Finished")}).end_reached
    assert not merge(deaths, {0: files[0]}).end_reached
    assert not merge(deaths).end_reached


def test_ranks_killed_because_a_peer_was_fenced_do_not_make_a_failure() -> None:
    assert merge({1: death(1)}, {1: file("Fenced")}).kind == OutcomeKind.FENCED


def test_ranks_killed_for_a_newer_plan_are_fenced_but_a_file_stands() -> None:
    assert merge({}, killed_as="Fenced").kind == OutcomeKind.FENCED
    assert merge({0: death(1)}, killed_as="Fenced").kind == OutcomeKind.FAILED


def test_a_rank_that_vanished_is_a_failure_even_when_the_others_finished() -> None:
    merged = merge({0: death(0), 1: death(0)}, launcher_error="torchrun exited with code -9")
    assert (merged.kind, merged.message) == (OutcomeKind.FAILED, "torchrun exited with code -9")


@pytest.mark.parametrize(
    ("code", "kind", "files", "well"),
    [
        (0, None, [], True),
        (0, None, ["open"], False),  # left inside its session
        (0, "Finished", ["open", "json"], True),  # os._exit(0) is how scripts leave NCCL's teardown out
        (-9, "Finished", ["open", "json"], False),  # the OOM killer, while the model is exported
        (-6, "Finished", ["open", "json", "ended"], True),  # the teardown of CUDA or NCCL (T22)
        (120, "Finished", ["open", "json", "ended"], True),
        (9, "Finished", ["open", "json", "ended"], False),  # sys.exit(9)
        (-9, "SavedAndStopped", ["open", "json"], True),  # the grace period is over
        (1, "Failed", ["open", "json"], False),
        (1, None, [], False),
    ],
)
def test_a_finished_training_is_followed_by_the_rest_of_the_script(
    tmp_path: Path, code: int, kind: str | None, files: list[str], well: bool
) -> None:
    for suffix in files:
        (tmp_path / f"rank-00002.{suffix}").touch()
    assert launch.ended_well(str(tmp_path), 2, code, kind) is well


def test_a_rank_that_fails_after_its_training_is_blamed_when_it_did_and_not_when_it_finished() -> None:
    files = {rank: file("Finished", 10.0, step=8, message="step 8 is committed") for rank in range(3)}
    merged = merge({0: death(1, 70.1, "reset by peer"), 1: death(0, 10.1), 2: death(-9, 70.0)}, files)
    assert (merged.kind, merged.step) == (OutcomeKind.FAILED, 8)
    assert merged.message == "rank 2 was killed by SIGKILL after its training (step 8 is committed)"
    assert merge({rank: death(-6, well=True) for rank in range(3)}, files).kind == OutcomeKind.FINISHED
    lost = merge({0: death(0)}, files, launcher_error="torchrun exited with code -9")
    assert (lost.kind, lost.message) == (OutcomeKind.FAILED, "torchrun exited with code -9")
    assert merge({0: death(0)}, files, killed_as="Stopped").kind == OutcomeKind.STOPPED


def test_an_outcome_fits_the_termination_message_whatever_the_error_is() -> None:
    outcome = launch.merge_outcome(PLAN, {0: death(1, error="ü" * 5000 + "the end")}, {})
    outcome["message"] = "é" * 9000
    data = launch.bounded_json(outcome)
    assert len(data) <= 4096
    assert json.loads(data)["kind"] == "Failed"

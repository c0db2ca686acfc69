"""`rtj rollback`, `pin` and `--job`: what a person orders stands in the journal, and the next fence obeys it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import store_world as world
from cluster_desk import Desk
from job_values import job

from trainer_sidecar.contract.journal import Cause, Manifest
from trainer_sidecar.kube_commands import rollback
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.fence import Fenced
from trainer_sidecar.store.history import History
from trainer_sidecar.store.open import open_store


class Run:
    """A job `run` whose run has three commits, and an operator that saves on suspend and fences on resume."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        self.desk = desk
        self.url = f"file://{folder}/store"
        self.store = open_store(self.url)
        self.fenced: Fenced = world.fence(self.store)
        self.commits: list[Manifest] = [world.save(self.store, self.fenced, step) for step in (1, 2, 3)]
        self.job = desk.server.put(job("run", store=self.url))
        self.resumed: Fenced | None = None
        desk.server.on_patch = self.obey

    def obey(self, found: dict[str, Any]) -> None:
        if found["spec"].get("suspend") and found["status"]["phase"] == "Running":
            self.commits.append(world.save(self.store, self.fenced, 4))
        elif not found["spec"].get("suspend"):
            self.resumed = world.fence(self.store, "nonce-2", cause=Cause.RESUMED)
        phase = "Suspended" if found["spec"].get("suspend") else "Running"
        found["status"] |= {"phase": phase, "observedGeneration": found["metadata"]["generation"]}

    @property
    def ids(self) -> list[str]:
        return [commit.checkpoint_id for commit in self.commits]

    def history(self) -> History:
        return world.journal(self.store).read()


@pytest.fixture
def run(desk: Desk, tmp_path: Path) -> Run:
    return Run(desk, tmp_path)


def test_a_rollback_suspends_quarantines_what_came_after_and_goes_on_from_there(run: Run) -> None:
    wanted = run.ids[0]
    text = run.desk.rtj("rollback", "run", wanted, "--reason", "loss went up", "--by", "ada")
    assert run.resumed is not None
    restore = run.resumed.entry.restore
    assert restore is not None
    assert restore.checkpoint_id == wanted
    assert run.job["spec"]["suspend"] is False
    quarantined = run.history().quarantined
    assert set(quarantined) == set(run.ids[1:]), "the save that the suspend made as well"
    entry = quarantined[run.ids[1]]
    assert (entry.fault, entry.reason) == ("state", f"rollback to {wanted} by ada: loss went up")
    assert [line.split()[1] for line in text.splitlines()[1:]] == ["2", "3", "4"]
    later = world.save(run.store, run.resumed, 2)
    assert run.history().newest_restorable == world.point(later)


def test_a_dry_run_shows_what_would_be_given_up_and_changes_nothing(run: Run) -> None:
    rows = run.desk.json("rollback", "run", run.ids[1], "--dry-run")
    assert [row["given up"] for row in rows] == [run.ids[2]]
    assert not run.history().quarantined
    assert not run.job["spec"].get("suspend")


def test_a_rollback_to_the_newest_commit_drops_what_was_trained_since(run: Run) -> None:
    run.desk.rtj("rollback", "run", run.ids[2])
    assert set(run.history().quarantined) == {run.ids[3]}
    assert run.resumed is not None
    assert run.resumed.entry.restore == world.point(run.commits[2])


def test_a_job_that_was_suspended_stays_so(run: Run) -> None:
    run.job["spec"]["suspend"] = True
    run.job["status"]["phase"] = "Suspended"
    run.desk.rtj("rollback", "run", run.ids[0])
    assert run.job["spec"]["suspend"] is True
    assert "stays so: rtj resume run" in run.desk.said
    assert run.history().newest_restorable == world.point(run.commits[0])


def test_a_failed_job_starts_again_from_the_older_checkpoint(run: Run) -> None:
    run.job["status"]["phase"] = "Failed"
    generation = run.job["metadata"]["generation"]
    run.desk.rtj("rollback", "run", run.ids[0])
    assert run.job["metadata"]["generation"] > generation, "a change of the spec is what starts it again"
    assert run.resumed is not None
    assert run.resumed.entry.restore == world.point(run.commits[0])


def test_a_checkpoint_that_cannot_be_gone_back_to_is_refused_before_the_job_is_touched(run: Run) -> None:
    run.desk.rtj("rollback", "run", "000000000009-0000000001-00000000", code=2)
    assert "was never committed in this run" in run.desk.said
    run.desk.rtj("rollback", "run", "yesterday", code=2)
    run.desk.rtj("rollback", "run", run.ids[2])
    run.desk.rtj("rollback", "run", run.ids[3], code=2)
    assert "is under quarantine (rollback to" in run.desk.said
    assert run.job["spec"]["suspend"] is False


def test_a_store_that_cannot_be_read_leaves_the_job_alone_and_names_whose_credentials_are_used(
    run: Run,
) -> None:
    run.job["spec"]["checkpoint"]["store"]["url"] = f"{run.url}/not/there"
    run.desk.rtj("rollback", "run", run.ids[0], code=69)
    assert "with your own credentials" in run.desk.said
    assert not any(asked.startswith("PATCH") for asked in run.desk.server.asked)


def test_a_rollback_as_another_job_is_a_fork_and_needs_no_store(run: Run) -> None:
    run.job["spec"]["checkpoint"] |= {"store": {"url": "s3://nowhere/x"}, "adopt": True}
    run.desk.rtj("rollback", "run", run.ids[0], "--as", "run-2")
    made = run.desk.server.jobs["team", "run-2"]
    assert made["spec"]["checkpoint"]["resumeFrom"] == {"runId": "run", "checkpointId": run.ids[0]}
    assert "adopt" not in made["spec"]["checkpoint"]
    assert made["spec"]["suspend"] is False
    assert run.job["spec"]["suspend"] is True


def test_a_fork_that_would_be_refused_leaves_the_job_running(run: Run) -> None:
    run.desk.server.put(job("run-2"))
    run.desk.rtj("rollback", "run", run.ids[0], "--as", "run-2", code=1)
    assert "already exists" in run.desk.said
    assert not run.job["spec"].get("suspend")
    run.desk.rtj("rollback", "run", run.ids[0], "--as", "run-3", "--dry-run")
    assert ("team", "run-3") not in run.desk.server.jobs


def test_pins_of_a_job_stand_in_its_journal(run: Run) -> None:
    run.desk.rtj("pin", "run", run.ids[0], "--by", "ada")
    assert run.history().holds == {run.ids[0]: frozenset({"user ada"})}
    assert run.desk.json("pin", "run", "--by", "ada") == [{"checkpoint": run.ids[2], "held by": ["user ada"]}]
    run.desk.rtj("unpin", "run", run.ids[0], "--by", "ada")
    assert run.ids[0] not in run.history().holds
    run.desk.rtj("unpin", "run", run.ids[0], "--by", "ada", code=2)
    assert "is not held by 'user ada'" in run.desk.said


def test_the_stores_commands_take_a_job_instead_of_a_store(run: Run) -> None:
    rows = json.loads(run.desk.rtj("checkpoints", "list", "--job", "run", "-o", "json"))
    assert [row["checkpoint"] for row in rows] == list(reversed(run.ids))
    assert "good" in run.desk.rtj("checkpoints", "verify", "all", "--deep", "--job", "run")
    assert "step 3 committed" in run.desk.rtj("journal", "tail", "-n", "1", "--job", "run")
    assert run.ids[0] in run.desk.rtj("checkpoints", "list", "--job", "run", "-n", "team")
    run.desk.rtj("checkpoints", "list", "--job", "ruin", code=1)
    assert "there is run" in run.desk.said
    run.desk.rtj("checkpoints", "list", "--store", run.url, code=2)
    assert "--run-id; or --job NAME" in run.desk.said


def test_a_job_whose_store_refuses_says_whose_credentials_were_used(run: Run) -> None:
    run.job["spec"]["checkpoint"]["store"]["url"] = f"{run.url}/not/there"
    run.desk.rtj("checkpoints", "list", "--job", "run", code=69)
    assert "not with those of the job's Secret" in run.desk.said


def test_a_rollback_that_was_interrupted_is_finished_by_the_same_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreError("the server does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(rollback, "quarantine", away)
        run.desk.rtj("rollback", "run", run.ids[0], code=69)
    assert "not rolled back yet, the same command again goes on; job run is left suspended" in run.desk.said
    assert run.job["status"]["phase"] == "Suspended"
    assert not run.history().quarantined
    run.desk.rtj("rollback", "run", run.ids[0])
    run.desk.rtj("resume", "run", "--wait")
    assert run.resumed is not None
    assert run.resumed.entry.restore == world.point(run.commits[0])

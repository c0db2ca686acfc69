"""`spec.drill`: when a drill is due, what it is called, and which ones stay. Hostile words of a reader."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from drill_world import NOW, DrillCluster
from fake_cluster import KEY, job_object

from rtj_operator.api import ResumableTrainingJob, parse_job
from rtj_operator.api.drill import DrilledCheckpoint, ResumeDrill, parse_drill
from rtj_operator.api.names import LABEL_SCHEDULED_BY, MAX_DRILL_NAME_LENGTH
from rtj_operator.drills.reading import reading
from rtj_operator.drills.schedule import Due, drill_name, next_due, scheduled
from rtj_operator.kube import DRILLS, RTJ
from trainer_sidecar.contract.drill import ReadResult

ID = "000000000007-0000000001-0123abcd"
POINT = DrilledCheckpoint(checkpoint_id=ID, run_id="sft", step=7, sequence=9)


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def scheduled_job(
    sequence: int | None = 9, name: str = "sft", phase: str = "Running", **drill: Any
) -> ResumableTrainingJob:
    raw = job_object()
    raw["metadata"]["name"] = name
    raw["spec"]["drill"] = drill
    commit = {"step": 7, "checkpointId": ID, "sequence": sequence, "time": stamp(NOW)}
    raw["status"] = {"phase": phase, "startedAt": stamp(NOW), "conditions": []}
    raw["status"] |= {"lastCommitted": commit} if sequence else {}
    return parse_job(raw)


def made(name: str, at: float, phase: str = "Passed") -> ResumeDrill:
    meta = {"name": name, "namespace": "ns", "uid": name, "labels": {LABEL_SCHEDULED_BY: "uid-job"}}
    meta["creationTimestamp"] = stamp(at)
    return parse_drill({"metadata": meta, "spec": {"jobName": "sft"}, "status": {"phase": phase}})


def test_a_schedule_by_time_waits_for_a_commit_and_then_for_its_time() -> None:
    assert next_due(scheduled_job(None, everySeconds=60), [], NOW + 90) is None
    assert next_due(scheduled_job(everySeconds=60), [], NOW + 20) == 40.0
    assert next_due(scheduled_job(everySeconds=60), [], NOW + 60) == Due(0, None)
    last = made("sft-5", NOW)
    assert next_due(scheduled_job(everySeconds=60), [last], NOW + 50) == 10.0


def test_a_schedule_by_commits_counts_from_the_commit_that_the_last_drill_was_made_after() -> None:
    assert next_due(scheduled_job(everyCommits=5), [], NOW) == Due(0, 5)
    assert next_due(scheduled_job(everyCommits=5), [made("sft-5", NOW)], NOW) == Due(5, 5)


def test_of_two_drills_made_in_one_second_the_later_commit_s_is_the_last_one() -> None:
    job, two = scheduled_job(12, everyCommits=5), [made("sft-10", NOW), made("sft-9", NOW)]
    assert next_due(job, two, NOW) == Due(10, 5)
    assert [d.metadata.name for d in scheduled(job, two)] == ["sft-9", "sft-10"]


def test_there_is_one_drill_at_a_time_and_one_for_each_newest_commit() -> None:
    job = scheduled_job(everySeconds=60)
    assert next_due(job, [made("sft-5", NOW, "Running")], NOW + 900) is None
    assert next_due(job, [made("sft-9", NOW)], NOW + 900) is None, "nothing was committed since"


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_a_job_that_has_ended_is_drilled_no_more(phase: str) -> None:
    assert next_due(scheduled_job(phase=phase, everySeconds=60), [], NOW + 900) is None


def test_names_fit_and_tell_long_jobs_apart() -> None:
    assert drill_name(scheduled_job(everyCommits=1)) == "sft-9"
    names = {drill_name(scheduled_job(9_999_999_999, "a" * 40 + end, everyCommits=1)) for end in "bc"}
    assert len(names) == 2
    assert all(len(name) <= MAX_DRILL_NAME_LENGTH for name in names)


def test_the_schedule_makes_drills_and_keeps_the_last_three(tmp_path: Path) -> None:
    cluster = DrillCluster(tmp_path / "store")
    cluster.edit_job(drill={"everyCommits": 2, "deep": True, "nodes": 1, "priorityClassName": "low"})
    raw = cluster.kube.objects[RTJ.plural, *KEY]
    newest = cluster.commits[1]
    commit = {"step": 2, "checkpointId": newest.checkpoint_id, "sequence": newest.seq, "time": stamp(NOW)}
    raw["status"] = {"phase": "Running", "lastCommitted": commit, "conditions": []}
    labels = {LABEL_SCHEDULED_BY: "uid-job"}
    for number in (0, 1):
        meta = {"name": f"old-{number}x", "namespace": "ns", "labels": labels}
        cluster.kube.put(
            DRILLS, {"metadata": meta, "spec": {"jobName": "sft"}, "status": {"phase": "Failed"}}
        )
    cluster.look()
    name = f"sft-{newest.seq}"
    assert cluster.drills() == ["old-0x", "old-1x", name]
    assert cluster.drill(name).spec.nodes == 1
    assert cluster.drill(name).spec.overrides.priority_class_name == "low"
    assert (
        cluster.kube.objects[DRILLS.plural, "ns", name]["metadata"]["ownerReferences"][0]["uid"] == "uid-job"
    )
    drilled = cluster.kube.objects[DRILLS.plural, "ns", name]
    drilled["status"] = {"phase": "Passed"}
    meta = {"name": "old-2x", "namespace": "ns", "labels": labels}
    cluster.kube.put(DRILLS, {"metadata": meta, "spec": {"jobName": "sft"}, "status": {"phase": "Failed"}})
    cluster.look()
    assert len(cluster.drills()) == 3
    assert name in cluster.drills(), "the newest ones stay"


def pod(message: str | None, name: str = "rtj-reader") -> dict[str, Any]:
    state = {"terminated": {"message": message}} if message is not None else {"running": {}}
    return {"status": {"containerStatuses": [{"name": name, "state": state}]}}


@pytest.mark.parametrize(
    "message",
    [
        "",
        "no JSON",
        "[]",
        '{"checkpointId": 7}',
        '{"checkpointId": "' + ID + '", "bytes": -1}',
        '{"checkpointId": "' + ID + '", "seconds": "NaN"}',
        ReadResult(checkpoint_id=ID.replace("7", "8")).to_json(),
        ReadResult(checkpoint_id=ID).to_json()[:-1] + " " * 5000 + "}",
        "\x1b[2J" * 4000,
    ],
)
def test_words_of_a_reader_that_are_no_result_are_none(message: str) -> None:
    seen = reading({}, [pod(message)], POINT)
    assert seen.result is None
    assert seen.text.isprintable()
    assert len(seen.text) <= 500
    failed = {
        "status": {"conditions": [{"type": "Failed", "status": "True", "message": "BackoffLimitExceeded"}]}
    }
    assert "BackoffLimitExceeded" in reading(failed, [pod(message)], POINT).failed


def test_a_result_counts_from_the_reader_alone_and_whatever_other_pods_said() -> None:
    good = ReadResult(checkpoint_id=ID, bytes=5).to_json()
    assert reading({}, [pod(good, "another")], POINT).result is None
    found = reading({}, [pod(None), pod("the store is away"), pod(good)], POINT).result
    assert found is not None
    assert found.bytes == 5

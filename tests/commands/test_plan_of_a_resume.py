"""`rtj plan --resume`: what the matrix lets a checkpoint resume on now, and which drill has opened it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import store_world as world
import yaml

from trainer_sidecar import cli
from trainer_sidecar.contract.checkpoint import fingerprints_digest
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.store.drills import DrillPassed, record_drill

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.s3

WANTED = Topology(
    nodes=2,
    ranks_per_node=2,
    mesh=Mesh(dp=4),
    batch=Batch(global_batch_size=12, micro_batch_size=3, accumulation=1),
)


@pytest.fixture
def url(s3_url: str) -> str:
    """A job's store is one of S3: a plan of any other is refused."""
    return s3_url


def job_file(run: Run, folder: Path, **checkpoint: Any) -> Path:
    keys = world.KEYS
    spec = {
        "nodes": 2,
        "ranksPerNode": 2,
        "elastic": {"minNodes": 1},
        "batch": {"globalBatchSize": 12},
        "resumeCompatibility": [
            {"from": {"dp": "*"}, "to": {"dp": "*"}, "status": "blocked_until_drill_passes"}
        ],
        "checkpoint": {"store": {"url": run.url}, "runId": keys.run_id, **checkpoint},
        "template": {"spec": {"containers": [{"name": "trainer", "command": ["train.py"]}]}},
    }
    meta = {"name": "job", "namespace": keys.namespace}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({"kind": "ResumableTrainingJob", "metadata": meta, "spec": spec}))
    return path


def test_a_blocked_size_is_shown_until_a_drill_has_proven_it_and_then_with_that_drill(
    run: Run, tmp_path: Path
) -> None:
    path = str(job_file(run, tmp_path))

    def rows(*words: str) -> list[dict[str, Any]]:
        assert cli.main(["plan", "-f", path, "-o", "json", *words]) == 0
        found: list[dict[str, Any]] = json.loads(run.capture()[0])
        return found

    assert [r["mesh"] for r in rows()] == ["dp2xtp1xpp1/zero3", "dp4xtp1xpp1/zero3"], "nothing is resumed"
    same, other = rows("--resume")
    assert (same["mesh"], same["note"]) == ("dp2xtp1xpp1/zero3", "")
    assert other["mesh"] is None
    assert "run a drill of it" in other["note"]
    journal = world.journal(run.store)
    journal.read()
    passed = DrillPassed(run.ids[0], "uid-probe", "probe", world.topology(), WANTED, fingerprints_digest({}))
    record_drill(journal, passed, owner=world.OWNER, writer="operator/test")
    proven = rows("--resume", run.ids[2])[1]
    assert proven["mesh"] == "dp4xtp1xpp1/zero3"
    assert proven["note"].startswith("proven by drill probe on ")
    assert run.ids[0] in proven["note"], "another checkpoint with the same fingerprints"
    assert "dp2xtp1xpp1/zero3 on dp4xtp1xpp1/zero3 by drill probe" in run.rtj("journal", "tail")


def test_before_its_first_commit_a_fork_is_planned_from_the_run_that_it_starts_from(
    run: Run, tmp_path: Path
) -> None:
    source = {"runId": world.KEYS.run_id}
    path = str(job_file(run, tmp_path, runId="fork", resumeFrom=source))
    assert cli.main(["plan", "-f", path, "--resume"]) == 0
    heading = run.capture()[0].splitlines()[0]
    assert heading == f"resume of {run.ids[-1]} of run team/run: step 3, mesh {world.topology().mesh}"
    path = str(job_file(run, tmp_path, runId="fork", resumeFrom={**source, "checkpointId": run.ids[0]}))
    assert cli.main(["plan", "-f", path, "--resume"]) == 0
    assert run.capture()[0].startswith(f"resume of {run.ids[0]} ")

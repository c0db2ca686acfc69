"""DeepSpeed's own folders through a FolderSession: the script of docs/own-folder.md on CPU, killed, resumed on its own
ranks bit for bit, and on others by the Universal Checkpoint as a named migration that the matrix gates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from framework_runs import ALONE, BATCH, PAIR, SCRIPTS, Lab
from rank_world import topology

from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.topology import Topology

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = "deepspeed_rank.py"
STEPS = 7
"""Three after the commit that is resumed: as many as are compared."""
FOUR = topology(4, BATCH, micro=2)


class DeepSpeedLab(Lab):
    """Attempts with DeepSpeed in their parent; each works in a folder of its own."""

    imports = ("tests.integrations.scripts.deepspeed_quiet",)

    def env(self, plan: Plan, **more: str) -> dict[str, str]:
        work = str(self.world.root / f"work-{plan.epoch}")
        return {"DS_TOTAL": str(STEPS), "DS_FOLDER": work, "DS_ACCELERATOR": "cpu", **more}

    def of(self, where: Topology, stage: int, step: int = 0, before: Plan | None = None) -> Plan:
        """An attempt that goes on from what `before` has committed of `step`."""
        point = None
        if before is not None:
            point = self.point(next(c for c in self.commits(before) if c.step == step))
        return self.attempt(staged(where, stage), point)

    def done(self, plan: Plan, **more: str) -> list[dict[str, Any]]:
        return self.finished(plan, SCRIPT, **self.env(plan, **more))

    def refused(self, plan: Plan, **more: str) -> str:
        """The refusal, the same on all ranks and in the outcome."""
        assert set(self.run(plan, SCRIPT, **self.env(plan, **more))) != {0}
        assert self.outcome(plan) is OutcomeKind.RESUME_REFUSED, self.log(plan)
        path = self.world.out / f"deepspeed-e{plan.epoch}-r0.json"
        return str(json.loads(path.read_text())["refused"])


def staged(where: Topology, stage: int) -> Topology:
    return where.model_copy(update={"mesh": where.mesh.model_copy(update={"zero": stage})})


def losses(ranks: list[dict[str, Any]]) -> dict[int, float]:
    """By step, over the ranks."""
    return {int(s): sum(r["losses"][s] for r in ranks) / len(ranks) for s in ranks[0]["losses"]}


def after(step: int, all_losses: dict[int, float]) -> dict[int, float]:
    return {s: loss for s, loss in all_losses.items() if s > step}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepSpeedLab]:
    root = tmp_path_factory.mktemp("deepspeed")
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get(
            "PYTHONDONTWRITEBYTECODE"
        ):  # else each process compiles what it imports, for ten seconds
            patch.delenv("PYTHONDONTWRITEBYTECODE")
            patch.setenv("PYTHONPYCACHEPREFIX", str(root / "pyc"))
        made = DeepSpeedLab(root)
        yield made
        made.close()


@pytest.fixture(scope="module")
def controls(lab: DeepSpeedLab) -> dict[int, tuple[Plan, list[dict[str, Any]]]]:
    """By ZeRO stage: a run of two ranks that nothing has stopped."""
    found = {}
    for stage in (1, 2, 3):
        plan = lab.of(PAIR, stage)
        found[stage] = plan, lab.done(plan, DS_TOTAL="8")
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_its_own_ranks_go_on_bit_for_bit_and_others_by_the_universal_checkpoint(
    lab: DeepSpeedLab, controls: dict[int, tuple[Plan, list[dict[str, Any]]]], stage: int
) -> None:
    control, ranks = controls[stage]
    assert [c.step for c in lab.commits(control)] == [2, 4, 6, 8]
    assert [r["stage"] for r in ranks] == [stage, stage]
    assert [r["saved"] for r in ranks] == [[], []]
    whole = losses(ranks)

    again = lab.of(PAIR, stage, 4, control)
    found = lab.done(again)
    for mine, theirs in zip(found, ranks, strict=True):
        assert mine["losses"] == {s: theirs["losses"][s] for s in ("5", "6", "7")}
        assert mine["migration"] == ""
        assert mine["path"].endswith(f"work-{again.epoch}/restored")
    assert found[0]["report"]["resharded"] is False
    assert found[0]["report"]["derived"] == []
    assert found[0]["report"]["verified"] is True

    other = lab.of(ALONE if stage != 3 else FOUR, stage, 4, control)
    found = lab.done(other)
    assert losses(found) == pytest.approx({s: whole[s] for s in (5, 6, 7)}, rel=1e-5)
    first = found[0]
    assert first["migration"] == "deepspeed-universal"
    assert first["path"].endswith("restored/deepspeed-universal")
    assert "deepspeed-universal/latest_universal" in first["files"]
    assert not [f for f in first["files"] if f.startswith(("rank-", "all-ranks"))], "the input is gone"
    report = first["report"]
    assert report["resharded"] is True
    assert report["verified"] is True
    assert all(c["name"] != "migration" for c in report["checks"]), "nobody checks what a converter does"
    change = f"from dp2xtp1xpp1/zero{stage} to dp{len(found)}xtp1xpp1/zero{stage}"
    assert f"migration 'deepspeed-universal' {change}: " in report["derived"][0]
    assert report["seconds"]["migrate"] > 0

    last = lab.of(ALONE if stage != 3 else FOUR, stage, 6, other)
    found = lab.done(last, DS_TOTAL="8")  # from a folder that an engine with load_universal has saved
    assert found[0]["migration"] == ""
    assert losses(found) == pytest.approx({s: whole[s] for s in (7, 8)}, rel=1e-5)
    assert found[0]["rate"] == pytest.approx(ranks[0]["rate"])


def test_a_change_of_ranks_is_refused_by_name_without_one_converter_that_works(
    lab: DeepSpeedLab, controls: dict[int, tuple[Plan, list[dict[str, Any]]]]
) -> None:
    control, _ = controls[1]
    meshes = "dp2xtp1xpp1/zero1"
    said = lab.refused(lab.of(ALONE, 1, 4, control), DS_BREAK="nothing")
    assert f"were written on {meshes}, this attempt has dp1xtp1xpp1/zero1" in said
    assert "migrations={'deepspeed-universal': convert}" in said
    said = lab.refused(lab.of(ALONE, 1, 4, control), DS_BREAK="two")
    assert "the script offers 2 migrations (deepspeed-universal, other)" in said
    broken = lab.of(FOUR, 1, 4, control)
    said = lab.refused(broken, DS_BREAK="loses a shard")
    assert f"rank 0: migration 'deepspeed-universal' from {meshes} to dp4xtp1xpp1/zero1 failed: " in said
    assert f"restored/all-ranks: repair the converter and start again, or resume on {meshes}" in said
    assert (lab.world.root / f"work-{broken.epoch}" / "restored" / "all-ranks" / "latest").exists()
    work = str(
        lab.world.root / f"work-{broken.epoch}"
    )  # what a failed conversion has left is in nobody's way
    repaired = lab.of(ALONE, 1, 6, control)
    (found,) = lab.done(repaired, DS_FOLDER=work)
    assert found["migration"] == "deepspeed-universal"


def rtj_run(store: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = [
        "run",
        f"--store=file://{store}",
        "--run-id=ds",
        "--json",
        "--interval-steps=2",
        "--interval-seconds=0",
    ]
    return subprocess.run(
        [sys.executable, "-m", "trainer_sidecar.cli", *words, *options, "--", str(SCRIPTS / SCRIPT)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_rtj_run_starts_a_killed_script_again_and_the_jobs_matrix_decides_on_fewer_ranks(
    controls: dict[int, tuple[Plan, list[dict[str, Any]]]], tmp_path: Path
) -> None:
    whole, store, out = losses(controls[2][1]), tmp_path / "store", tmp_path / "out"
    out.mkdir()
    env = {"TINY_OUT": str(out), "DS_FOLDER": str(tmp_path / "work"), "DS_TOTAL": "6"}
    batch = ("--zero=2", "--global-batch=8", "--max-micro-batch=2")
    first = rtj_run(store, "--nproc=2", *batch, **env, DS_KILL="5")
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stderr.count('"event": "AttemptStarted"') == 2, first.stderr
    resumed = written(out, 2)
    start = resumed[0]["report"]["step"]
    assert start in (2, 4)
    assert losses(resumed) == after(start, {s: whole[s] for s in range(1, 7)})

    job = tmp_path / "job.yaml"
    for status, code in (("blocked_until_drill_passes", 2), ("verified", 0)):
        job.write_text(yaml.safe_dump(job_of(status)))
        then = rtj_run(store, "-f", str(job), "--nproc=1", **env | {"DS_TOTAL": "8"})
        said = then.stdout + then.stderr
        assert then.returncode == code, said
        assert ("TransitionBlocked: resuming a checkpoint of dp2xtp1xpp1/zero2" in said) == bool(code), said
        assert ('"event": "AttemptStarted"' in said) == (not code), said
    (found,) = written(out, 1)
    assert found["migration"] == "deepspeed-universal"
    assert losses([found]) == pytest.approx({s: whole[s] for s in (7, 8)}, rel=1e-5)


def job_of(status: str) -> dict[str, Any]:
    entry = {"from": {"dp": 2, "zero": 2}, "to": {"dp": 1, "zero": 2}, "status": status}
    container = {"name": "trainer", "image": "x", "command": ["train.py"]}
    return {
        "apiVersion": "resumabletraining.io/v1alpha1",
        "kind": "ResumableTrainingJob",
        "metadata": {"name": "ds", "namespace": "ns"},
        "spec": {
            "nodes": 1,
            "parallelism": {"zero": 2},
            "batch": {"globalBatchSize": 8, "maxMicroBatchSize": 2},
            "checkpoint": {"store": {"url": "file:///x"}, "intervalSteps": 2, "intervalSeconds": 0},
            "resumeCompatibility": [entry],
            "template": {"spec": {"containers": [container]}},
        },
    }


def written(out: Path, ranks: int) -> list[dict[str, Any]]:
    """By the ranks of the newest attempt."""
    epochs = sorted({int(path.name.split("-")[1][1:]) for path in out.glob("deepspeed-e*")})
    return [json.loads((out / f"deepspeed-e{epochs[-1]}-r{r}.json").read_text()) for r in range(ranks)]

"""D5, D6, D8: is what goes on what was saved: on other ranks, inside a gradient accumulation, by a control run."""

import time
from functools import partial

from trainer_sidecar.contract import API_GROUP, API_VERSION
from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.journal import Manifest
from trainer_sidecar.faultdrills.measure import step_of
from trainer_sidecar.faultdrills.outcome import Check, Seen
from trainer_sidecar.faultdrills.scratch import JOBS_ROOT
from trainer_sidecar.faultdrills.stage import Stage
from trainer_sidecar.kube_commands.cluster import JsonObject

_INSIDE = "inside an accumulation window"


def other_world_size(stage: Stage) -> Seen:
    """D5: half the ranks, which the matrix allows; then a tensor parallel mesh, which it does not."""
    stage.start(nodes=2, ranks=1)
    first = stage.trains()
    stage.commit()
    fault = time.monotonic()
    stage.patch(nodes=1)
    second, heard = stage.resumed(first)
    lost = stage.lost(first, second)
    verified = stage.wait("verdict on the resume", lambda: _verdict(stage))
    commit = stage.commit(beyond=step_of(second), epoch=second.seq)
    mesh = second.topology.mesh
    stage.patch(nodes=2, parallelism={"tp": 2})
    blocked = stage.wait("refusal of tp 2", lambda: _blocked(stage))
    attempts = stage.history().attempts
    checks = [
        Check(
            name="dp 2 to dp 1 resumes",
            holds=(mesh.dp, mesh.tp) == (1, 1) and second.restore is not None,
            seen=f"attempt {second.attempt} on dp {mesh.dp}, tp {mesh.tp}, from step {step_of(second)}",
        ),
        Check(
            name="with equal loss",
            holds=verified["reason"] == "ResumeMatched",
            seen=f"{verified['reason']}: {verified['message']}",
        ),
        Check(
            name="dp 1 to tp 2 is refused",
            holds=all(a.topology.mesh.tp == 1 for a in attempts),
            seen=f"{blocked}; no attempt has tp 2; step {commit.step} stays committed",
        ),
        *stage.proofs(),
    ]
    return stage.seen("spec.nodes 2 to 1, later parallelism.tp 1 to 2", checks, lost, heard - fault)


def _verdict(stage: Stage) -> JsonObject | None:
    found = stage.condition("ResumeVerified")
    return found if found.get("reason") in ("ResumeMatched", "ResumeDiffers", "ResumeRefused") else None


def _blocked(stage: Stage) -> str:
    """What the job says of a transition that the matrix does not allow."""
    for condition in stage.status.get("conditions") or []:
        if condition["reason"] == "TransitionBlocked":
            return f"{condition['type']}: {condition['message']}"
    return ""


def inside_accumulation(stage: Stage) -> Seen:
    """D6: a save between two micro steps, and a rank that dies later."""
    stage.start(
        interval=1000,
        ranks=2,
        env={"DRILL_MICRO_SECONDS": "0.3"},
        checkpoint={"accumulationSave": "raw", "intervalSeconds": 0},
        batch={"globalBatchSize": 8, "maxMicroBatchSize": 1},
    )
    first = stage.trains()
    stage.steps_told(first.seq, 2)
    pod = stage.pods()[0]
    stage.wish("save", pod)
    commit = stage.commit()
    inside = _micro_step(stage, commit)
    stage.steps_told(first.seq, commit.step + 2)
    fault = time.monotonic()
    killed = stage.signal_rank(pod)
    second, heard = stage.resumed(first)
    lost = stage.lost(first, second)
    stage.steps_told(second.seq, commit.step + 3)
    checks = [
        Check(
            name="the save was inside a window",
            holds=inside > 0,
            seen=f"step {commit.step} and {inside} of 4 micro steps",
        ),
        Check(
            name="it is the restore point",
            holds=second.restore is not None and second.restore.checkpoint_id == commit.checkpoint_id,
            seen=f"restored {second.restore.checkpoint_id if second.restore else None}",
        ),
        stage.same_losses(first, second, 1e-6),
        *stage.proofs(),
    ]
    return stage.seen(f"saved {_INSIDE}; {killed}", checks, lost, heard - fault)


def _micro_step(stage: Stage, commit: Manifest) -> int:
    file = ManifestFile.model_validate_json(stage.store.get(stage.keys.manifest(commit.checkpoint_id)))
    return file.progress.micro_step


def control_run(stage: Stage) -> Seen:
    """D8: after a rank's death, what is trained again is compared, and a sandbox trains the same samples once more."""
    stage.start(interval=20)
    first = stage.trains()
    commit = stage.commit()
    stage.steps_told(first.seq, commit.step + 4)
    fault = time.monotonic()
    killed = stage.signal_rank(stage.pods()[0])
    second, heard = stage.resumed(first)
    lost = stage.lost(first, second)
    restored = second.restore.checkpoint_id if second.restore else commit.checkpoint_id
    stage.commit(beyond=commit.step, epoch=second.seq)
    name = f"{stage.name}-control"
    stage.scratch.create(
        "resumedrills",
        {
            "apiVersion": f"{API_GROUP}/{API_VERSION}",
            "kind": "ResumeDrill",
            "metadata": {"name": name},
            "spec": {"jobName": stage.name, "checkpoint": restored, "lossTolerance": "0.000001"},
        },
    )
    stage.note(f"control run of {restored} ordered")
    status = stage.wait("end of the control run", partial(_drill_end, stage, name), 300)
    stage.scratch.delete("resumedrills", name)
    checks = [
        Check(
            name="the control run on the fixed samples matches",
            holds=status["phase"] == "Passed" and status["reason"] == "Matched",
            seen=f"{status['phase']} {status['reason']}: {status['message']}",
        ),
        stage.same_losses(first, second, 1e-6),
        *stage.proofs(),
    ]
    return stage.seen(killed, checks, lost, heard - fault)


def _drill_end(stage: Stage, name: str) -> JsonObject | None:
    path = f"{JOBS_ROOT}/namespaces/{stage.scratch.name}/resumedrills/{name}"
    status: JsonObject = (stage.cluster.call("GET", path) or {}).get("status") or {}
    return status if status.get("phase") in ("Passed", "Failed") else None

"""Jobs, pods and events as an API server returns them, for tests of the cluster's commands."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]
NOW = datetime.now(UTC).replace(microsecond=0)
CHECKPOINT = "000000000400-0000000003-1f2e3d4c"
VERIFIED = "000000000300-0000000003-aabbccdd"


def at(seconds: float) -> str:
    """A time so many seconds from now."""
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def commit(step: int, checkpoint: str, ago: float) -> Object:
    return {"step": step, "samples": step * 8, "checkpointId": checkpoint, "sequence": step, "time": at(-ago)}


RECORDS: list[Object] = [
    {
        "attempt": 1, "placement": 1, "epoch": 1, "cause": "First", "mesh": "dp4xtp1xpp1", "nodes": 2,
        "startedAt": at(-4000), "endedAt": at(-1000), "lastStep": 412, "outcome": "Failed", "node": "gpu-7",
        "message": "pod sft-p1-1-abcde on node gpu-7: rank 3 ended with exit code 1: RuntimeError: CUDA error",
        "traceback": "Traceback (most recent call last):\nRuntimeError: CUDA error",
        "seconds": {"schedule": 4.0, "restore": 2.5, "firstStep": 1.0, "total": 9.5},
    },
    {
        "attempt": 2, "placement": 1, "epoch": 3, "cause": "RankFailed", "fromStep": 400, "mesh": "dp4xtp1xpp1",
        "nodes": 2, "startedAt": at(-990), "seconds": {"detect": 0.4, "restore": 2.0, "total": 3.9},
    },
]  # fmt: skip


def job(
    name: str = "sft", namespace: str = "team", store: str = "s3://bucket/team-a", **status: Any
) -> Object:
    """A job of two nodes that trains in its second attempt; `status` replaces parts of its status."""
    told: Object = {
        "observedGeneration": 1,
        "phase": "Running",
        "reason": "RanksTraining",
        "message": "step 450",
        "nodes": 2,
        "conditions": [
            condition("Valid", "True", "SpecValid", "the spec can run"),
            condition("Degraded", "False", "AsExpected", "nothing needs a look"),
        ],
        "placement": {
            "number": 1, "jobName": f"{name}-p1", "nodes": 2, "wantedNodes": 2, "cause": "First", "createdAt": at(-4000)
        },
        "attempt": {
            "number": 2, "nonce": "n2", "placement": 1, "cause": "RankFailed", "startedAt": at(-990), "epoch": 3
        },
        "plan": {
            "nodes": 2, "ranksPerNode": 2, "worldSize": 4, "dp": 4, "tp": 1, "pp": 1, "zero": 3, "microBatchSize": 2,
            "accumulation": 1, "mesh": "dp4xtp1xpp1",
        },
        "lastCommitted": commit(400, CHECKPOINT, 1100),
        "lastVerified": commit(300, VERIFIED, 2000),
        "progress": {"step": 450, "samples": 3600, "loss": "2.125", "time": at(-5)},
        "recoveryPoint": {
            "committed": {"steps": 50, "samples": 400, "seconds": 95},
            "verified": {"steps": 150, "samples": 1200, "seconds": 1995},
            "summary": "50 steps/95s",
        },
        "checkpointInterval": {
            "policy": "Fixed", "seconds": 600, "steps": 300, "advisedSeconds": 240, "saveCostSeconds": 1.5,
            "mtbfSeconds": 19000, "restartSeconds": 3.9, "wastedFraction": 0.0184, "failures": 1, "nodeSeconds": 7800,
        },
        "counters": {"attempts": 2, "failures": 1, "preemptions": 0, "resizes": 0},
        "attempts": copy.deepcopy(RECORDS),
    }  # fmt: skip
    return {
        "apiVersion": "resumabletraining.io/v1alpha1",
        "kind": "ResumableTrainingJob",
        "metadata": {
            "name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": 1,
            "creationTimestamp": at(-5000)[:19] + "Z", "labels": {"team": "a"},
        },
        "spec": {
            "nodes": 2,
            "ranksPerNode": 2,
            "batch": {"globalBatchSize": 8},
            "checkpoint": {"store": {"url": store}, "intervalSteps": 100, "intervalSeconds": 600},
            "template": {"spec": {"containers": [{"name": "trainer", "image": "x", "command": ["train.py"]}]}},
        },
        "status": {**told, **status},
    }  # fmt: skip


def condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {
        "type": kind, "status": status, "reason": reason, "message": message, "observedGeneration": 1,
        "lastTransitionTime": at(-900),
    }  # fmt: skip


def pod(name: str, index: int, placement: int = 1, uid: str = "uid-sft", **status: Any) -> Object:
    labels = {
        "resumabletraining.io/uid": uid,
        "resumabletraining.io/placement": str(placement),
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    meta = {"name": name, "namespace": "team", "labels": labels}
    return {"metadata": meta, "spec": {"nodeName": f"gpu-{index}"}, "status": status}


def event(reason: str, message: str, ago: float, uid: str = "uid-sft") -> Object:
    return {
        "metadata": {"name": f"sft.{reason}", "namespace": "team"},
        "involvedObject": {"uid": uid},
        "eventTime": at(-ago),
        "type": "Normal",
        "reason": reason,
        "message": message,
    }

"""Specs that the API server refuses, each with a part of what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], None]


def set_at(*path: str | int, value: object) -> Change:
    """A change of one field."""

    def change(raw: dict[str, Any]) -> None:
        at: Any = raw
        for key in path[:-1]:
            at = at.setdefault(key, {}) if isinstance(at, dict) else at[key]
        at[path[-1]] = value

    return change


STORE = ("spec", "checkpoint", "store")
REFUSED: dict[str, tuple[Change, str]] = {
    "min above max": (
        set_at("spec", "elastic", value={"minNodes": 5, "maxNodes": 4}),
        "elastic.minNodes 5 is above",
    ),
    "nodes below min": (set_at("spec", "nodes", value=1), "nodes 1 is below elastic.minNodes 2"),
    "nodes above max": (
        set_at("spec", "elastic", "maxNodes", value=3),
        "nodes 4 is above elastic.maxNodes 3: lower nodes or raise maxNodes",
    ),
    "nodes not among sizes": (
        set_at("spec", "elastic", "sizes", value=[2, 3]),
        "nodes 4 is none of elastic.sizes",
    ),
    "a size out of range": (
        set_at("spec", "elastic", "sizes", value=[1, 4]),
        "every entry of elastic.sizes must",
    ),
    "no trainer": (
        set_at("spec", "template", "spec", "containers", 0, "name", value="main"),
        "must hold a container named trainer",
    ),
    "name too long": (set_at("metadata", "name", value="a" * 46), "must not be longer than 45 characters"),
    "name starts with a digit": (set_at("metadata", "name", value="7b"), "must start with a letter"),
    "name with a dot": (set_at("metadata", "name", value="a.b"), "lower-case letters, digits and '-'"),
    "no batch": (lambda raw: raw["spec"].pop("batch"), "spec.batch: Required value"),
    "batch of 0": (set_at("spec", "batch", "globalBatchSize", value=0), "greater than or equal to 1"),
    "a backoff that no clock can add": (
        set_at("spec", "restart", value={"backoffSeconds": 2**60, "maxBackoffSeconds": 2**60}),
        "less than or equal to 315360000",
    ),
    "more steps than a checkpoint's name holds": (
        set_at("spec", "checkpoint", "intervalSteps", value=10**12),
        "less than or equal to 999999999999",
    ),
    "file store": (set_at(*STORE, "url", value="file:///ckpt"), "store.url must be s3://bucket"),
    "store with dots up": (set_at(*STORE, "url", value="s3://ckpt/a?b"), "store.url must be s3://bucket"),
    "endpoint with a path": (
        set_at(*STORE, "endpoint", value="http://h/p"),
        "store.endpoint must be http(s)://host",
    ),
    "run id that leaves the prefix": (
        set_at("spec", "checkpoint", "runId", value="../x"),
        "spec.checkpoint.runId",
    ),
    "nothing ever saved": (
        lambda raw: raw["spec"]["checkpoint"].update(intervalSteps=0, intervalSeconds=0),
        "nothing would ever be saved",
    ),
    "adopt and fork": (
        lambda raw: raw["spec"]["checkpoint"].update(adopt=True, resumeFrom={"runId": "x"}),
        "exclude each other",
    ),
    "keepLast of 1": (
        set_at("spec", "checkpoint", "retention", value={"keepLast": 1}),
        "greater than or equal to 2",
    ),
    "staging of nothing": (
        set_at("spec", "checkpoint", "staging", value={"size": "0"}),
        "must be a quantity above 0",
    ),
    "staging that is no quantity": (
        set_at("spec", "checkpoint", "staging", value={"size": "64 gigs"}),
        "must be a quantity above 0",
    ),
    "tolerance as a float": (set_at("spec", "verification", value={"lossTolerance": 0.05}), "lossTolerance"),
    "unknown policy": (
        set_at("spec", "checkpoint", "whenBusy", value="Drop"),
        'supported values: "Skip", "Wait"',
    ),
    "a typo": (set_at("spec", "checkpoints", value={}), 'unknown field "spec.checkpoints"'),
    "a matrix that is no number": (
        set_at("spec", "resumeCompatibility", value=[{"from": {"dp": "x"}, "to": {}, "status": "verified"}]),
        "must be a number of at least 1, or '*' for any",
    ),
    "backoff above its maximum": (
        set_at("spec", "restart", value={"backoffSeconds": 9, "maxBackoffSeconds": 3}),
        "restart.backoffSeconds must not be above",
    ),
    "a restart rule about nothing": (
        set_at("spec", "restart", value={"rules": [{"action": "Fail"}]}),
        "a restart rule needs causes, exitCodes or logPattern",
    ),
}

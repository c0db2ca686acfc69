"""The jobs of a soak: two pods each, elastic, light enough that three of them share two cores."""

from __future__ import annotations

from hack.cluster_world import START_SECONDS, Job, World

BATCH = 8
"""Global batch size of `World.document`."""
KEEP_LAST = 6
"""Checkpoints that stay: enough that one can be damaged while older ones are whole."""


def start(world: World, count: int, *, steps: int, interval: int, pace: float) -> list[Job]:
    """Apply the jobs and wait until each has committed."""
    jobs = [_start(world, f"chaos-{number}", steps, interval, pace) for number in range(1, count + 1)]
    for job in jobs:
        job.wait_commit(beyond=0, seconds=2 * START_SECONDS)
    return jobs


def gpus_per_node(count: int) -> int:
    """So that every job has its two pods on two nodes, or one while a node is away."""
    return count


def _start(world: World, name: str, steps: int, interval: int, pace: float) -> Job:
    document = world.document(
        name, nodes=2, ranks=1, gpus=1, steps=steps, interval=interval,
        env={"TEST_PACE": "/ledger/pace", "TEST_DTYPE": "float64"},
        elastic={"minNodes": 1, "scaleDownDelaySeconds": 5, "scaleUpDelaySeconds": 5, "cooldownSeconds": 10},
        restart={
            # Faults come faster than anybody's failures would: none of them may end a job.
            "maxAttemptsWithoutProgress": 100, "backoffSeconds": 1, "maxBackoffSeconds": 8,
            "hangTimeoutSeconds": 120, "startupTimeoutSeconds": 900,
        },
    )  # fmt: skip
    document["spec"]["checkpoint"]["retention"] = {"keepLast": KEEP_LAST}
    (world.ledger(name) / "pace").write_text(str(pace))
    return world.job(document)

"""A sidecar's status says whose it is, and keeps the secret that signs reports."""

from __future__ import annotations

from collections.abc import Callable

from sidecar_world import World, eventually

MakeWorld = Callable[..., World]


def test_a_status_names_run_and_pod_and_not_the_nonce(make_world: MakeWorld) -> None:
    world = make_world(1, 1).start()
    epoch = world.begin().epoch
    eventually(lambda: world.pods[0].status().epoch == epoch, "the plan")
    code, body = world.pods[0].get("/status")
    assert code == 200
    status = world.pods[0].status()
    assert (status.run, status.pod) == ("team/job", "pod-0")
    assert world.plan is not None
    assert world.plan.nonce.encode() not in body

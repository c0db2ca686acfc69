"""A sidecar's status says whose it is, and keeps the secret that signs reports."""

from __future__ import annotations

from collections.abc import Callable

from sidecar_world import World, eventually

from trainer_sidecar.contract.plan import Order

MakeWorld = Callable[..., World]


def test_a_status_names_run_and_pod_and_the_order_that_it_has_seen_and_not_the_nonce(
    make_world: MakeWorld,
) -> None:
    world = make_world(1, 1).start()
    epoch = world.begin().epoch
    eventually(lambda: world.pods[0].status().epoch == epoch, "the plan")
    code, body = world.pods[0].get("/status")
    assert code == 200
    status = world.pods[0].status()
    assert (status.run, status.pod) == ("team/job", "pod-0")
    assert world.plan is not None
    assert world.plan.nonce.encode() not in body
    assert status.order is Order.RUN
    world.publish(world.plan.model_copy(update={"order": Order.SAVE_AND_EXIT}))
    eventually(lambda: world.pods[0].status().order is Order.SAVE_AND_EXIT, "the order")

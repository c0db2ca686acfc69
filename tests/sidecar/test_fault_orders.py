"""Orders of a drill in a real sidecar: each fires exactly as often as asked, in its pod, across restarts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sidecar_world import World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.fault_order import (
    ENV_FAULT_ORDERS,
    FIRED,
    MOST_BYTES,
    FaultOrder,
    OrdersRefusedError,
    as_text,
    check,
    from_text,
    sign,
)
from trainer_sidecar.sidecar.fault_orders import EXIT_KILLED, ArmedOrders

MakeWorld = Callable[..., World]
KEY = b"0123456789abcdef0123456789abcdef"
ORDER = (FaultOrder(point="before-claim", times=2),)


def started(make_world: MakeWorld, *orders: FaultOrder) -> World:
    world = make_world(1, 2)
    again(world, *orders)
    world.begin()
    world.connect()
    return world


def again(world: World, *orders: FaultOrder) -> None:
    world.pods[0].launch(**{ENV_FAULT_ORDERS: as_text(orders)})
    eventually(lambda: up(world), "sidecar up or dead")


def up(world: World) -> bool:
    pod = world.pods[0]
    assert pod.process is not None
    if pod.process.poll() is not None:
        return True
    try:
        return pod.get("/healthz")[0] == 200
    except OSError:
        return False


def fired(world: World) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in world.pods[0].log().splitlines()]
    return [line for line in lines if line["message"] == FIRED]


def commits(world: World) -> int:
    return len(world.history().manifests)


def test_a_sidecar_dies_as_often_as_ordered_and_commits_then(make_world: MakeWorld) -> None:
    world = started(make_world, *ORDER)
    save = world.save(10)
    for _ in range(2):
        assert world.pods[0].wait_dead() == EXIT_KILLED
        assert commits(world) == 0
        again(world, *ORDER)
    eventually(lambda: commits(world) == 1, "a commit")
    assert save.checkpoint in world.history().manifests
    assert [(f["point"], f["nth"], f["of"]) for f in fired(world)] == [
        ("before-claim", 1, 2),
        ("before-claim", 2, 2),
    ]


def test_requests_fail_as_often_as_ordered_and_the_save_commits_by_itself(make_world: MakeWorld) -> None:
    world = started(make_world, FaultOrder(point="store-write", after=1, times=3))
    world.save(10)
    eventually(lambda: commits(world) == 1, "a commit")
    world.save(20)
    eventually(lambda: commits(world) == 2, "another one")
    assert [f["nth"] for f in fired(world)] == [1, 2, 3]


def test_a_sidecar_frozen_before_its_commit_does_nothing_and_cannot_commit_behind_a_fence(
    make_world: MakeWorld,
) -> None:
    world = started(make_world, FaultOrder(point="before-claim", seconds=10))
    save = world.save(10)
    eventually(lambda: bool(fired(world)), "the freeze")
    fence = world.fence(None)
    assert "fault over" not in world.pods[0].log(), "it woke up too early"
    began = time.monotonic()
    assert world.pods[0].get("/healthz")[0] == 200
    assert time.monotonic() - began > 0.5, "it answered while it was frozen"
    eventually(lambda: "fault over" in world.pods[0].log(), "its word, perhaps behind that answer")
    eventually(lambda: "fenced" in world.pods[0].log().lower(), "word of the fence")
    eventually(lambda: world.pods[0].status().in_flight is None, "an outcome")
    assert save.checkpoint not in world.history().manifests
    assert world.history().epoch == fence.epoch


def test_an_order_for_another_pod_does_nothing(make_world: MakeWorld) -> None:
    world = started(
        make_world, FaultOrder(point="before-claim", pod=1), FaultOrder(point="after-hash", pod=7)
    )
    world.save(10)
    eventually(lambda: commits(world) == 1, "a commit")
    assert not fired(world)


def test_orders_are_taken_for_the_object_that_they_were_signed_for_and_in_time() -> None:
    text = sign(KEY, "ns", "job", ORDER, expires=1000)
    assert check(KEY, "ns", "job", text, now=999) == ORDER
    refused = [
        (b"another key of this length", "ns", "job", text, 0.0, "not signed with"),
        (KEY, "other", "job", text, 0.0, "not signed with"),
        (KEY, "ns", "other", text, 0.0, "not signed with"),
        (KEY, "ns", "job", text.replace('"times":2', '"times":3'), 0.0, "not signed with"),
        (KEY, "ns", "job", text.replace("1000", "9000"), 0.0, "not signed with"),
        (KEY, "ns", "job", text, 1000.0, "expired"),
        (KEY, "ns", "job", text, -2601.0, "another 3601 s, at most 3600"),
    ]
    for key, namespace, name, said, now, why in refused:
        with pytest.raises(OrdersRefusedError, match=why):
            check(key, namespace, name, said, now)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nonsense",
        '{"orders":[],"expires":9,"signature":""}',
        '{"orders":[{"point":"os.system"}],"expires":9,"signature":"é"}',
        '{"orders":[{"point":"before-claim","code":"import os"}],"expires":9,"signature":""}',
        '{"orders":[{"point":"before-claim","times":1e9}],"expires":9,"signature":""}',
        '{"orders":[{"point":"before-claim","seconds":"NaN"}],"expires":9,"signature":""}',
        '{"orders":[{"point":"before-claim","seconds":-1}],"expires":9,"signature":""}',
        '{"orders":[{"point":"before-claim"}],"expires":9,"signature":"\\u00e9"}',
        "x" * (MOST_BYTES + 1),
    ],
)
def test_what_is_no_order_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(OrdersRefusedError, match=r"\S"):
        check(KEY, "ns", "job", text, now=0)


def test_orders_pass_the_environment_unchanged() -> None:
    orders = (FaultOrder(point="store-read", pod=3, after=2, times=5, seconds=1.5), *ORDER)
    assert from_text(as_text(orders)) == orders
    assert from_text("") == ()


def test_two_orders_at_one_point_happen_one_after_the_other_and_each_counts_once(tmp_path: Path) -> None:
    orders = (
        FaultOrder(point="store-read", times=2),
        FaultOrder(point="store-read", after=1, times=1, seconds=0.01),
    )
    armed = ArmedOrders(orders, tmp_path / "faults.json")
    told = [armed.due("store-read") for _ in range(5)]
    assert [order.seconds if order else None for order in told] == [0, 0, 0.01, None, None]
    assert armed.fired == 3
    assert ArmedOrders(orders, tmp_path / "faults.json").fired == 3


def test_a_rank_is_told_to_freeze_or_to_end_as_often_as_ordered_and_the_status_counts(
    make_world: MakeWorld,
) -> None:
    orders = (
        FaultOrder(point="rank-steps", after=1, seconds=2),
        FaultOrder(point="rank-seals", times=1),
    )
    world = started(make_world, *orders)
    rank = world.ranks[0]
    step = m.ReportProgress(rank=rank.rank, step=1, epoch=0, samples=4)
    told = [rank.ask(step.model_copy(update={"phase": phase})) for phase in ("FirstStep", "", "", "")]
    assert told == [m.Done(), m.Done(), m.Fault(seconds=2), m.Done()], "phases are no steps"
    assert rank.hello() == m.Done(orders=True), "so the library waits for each answer"
    assert rank.ask(m.Sealed(save_id="none", rank=rank.rank)) == m.Fault(seconds=0)
    assert isinstance(rank.ask(m.Sealed(save_id="none", rank=rank.rank)), m.Failure), (
        "then it is asked as ever"
    )
    assert world.pods[0].status().faults_fired == 2
    assert [(f["point"], f["nth"], f["of"]) for f in fired(world)] == [
        ("rank-steps", 1, 1),
        ("rank-seals", 1, 1),
    ]
    again(world, *orders)
    assert world.pods[0].status().faults_fired == 2, "they outlive the container"

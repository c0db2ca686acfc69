"""The store's Secret comes after the pods, which never get its keys: others are made before anything trains in vain."""

from __future__ import annotations

import base64
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_cluster import Cluster, LocalStores
from operator_values import Situation, pods, running, sidecar

from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import CreateJob, FenceAndPublish
from rtj_operator.kube import JOBS, SECRETS
from rtj_operator.reconcile import TryLater
from trainer_sidecar.contract.status import SidecarStatus, TrainerState
from trainer_sidecar.store.base import AccessDeniedError

SECRET = "Secret ns/rtj-store"


def waiting(index: int, keys: bool | None) -> SidecarStatus:
    return sidecar(index, trainer=TrainerState.WAITING, epoch=0, progress=None, store_keys=keys)


def test_pods_that_began_before_the_secret_are_replaced_and_ranks_that_train_are_not() -> None:
    start = Situation()
    placed = start.after(start.decide()).seeing(jobs=1, pods=pods(2, status=waiting(0, False)))
    decision = placed.decide()
    assert any(isinstance(a, FenceAndPublish) for a in decision.actions), (
        "without a Secret pods may have an identity"
    )
    meant = placed.after(decision)
    late = replace(meant, observed=replace(meant.observed, late_secret=SECRET))
    decision = late.decide()
    assert not [a for a in decision.actions if isinstance(a, FenceAndPublish)]
    (event, *_) = decision.events
    assert event.reason == EventReason.PODS_WITHOUT_KEYS
    assert f"placement 1 began before {SECRET} had the store's keys" in event.message
    released = late.after(decision).seeing(jobs=(), pods=()).later(60)
    assert [a for d in (decision, released.decide()) for a in d.actions if isinstance(a, CreateJob)] == [
        CreateJob(2, 2)
    ]

    trains = running()
    late = replace(trains, observed=replace(trains.observed, late_secret=SECRET))
    assert not [a for a in late.decide().actions if isinstance(a, CreateJob)]


def test_the_operator_looks_at_the_secret_when_sidecars_have_no_keys(tmp_path: Path) -> None:
    class Denies(LocalStores):
        def get(self, spec: Any, credentials: Any) -> Any:
            if not credentials:
                raise AccessDeniedError("s3://bucket/team: no usable credentials")
            return self.store

    cluster = Cluster(tmp_path / "store")
    cluster.stores = Denies(tmp_path / "store")
    operator = cluster.operator()
    cluster.answers.update({index: waiting(index, False) for index in range(2)})

    def steps(count: int) -> None:
        for _ in range(count):
            with suppress(TryLater):
                cluster.step(operator)

    steps(6)
    assert cluster.status()["attempt"].get("epoch") is None
    assert cluster.history().attempts == ()
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    data = {name: base64.b64encode(value.encode()).decode() for name, value in keys.items()}
    cluster.kube.put(SECRETS, {"metadata": {"name": "rtj-store", "namespace": "ns"}, "data": data})
    steps(2)
    assert not cluster.history().attempts, "nothing is fenced for pods that could commit nothing"
    assert (
        "PodsWithoutKeys: the 2 pods of placement 1 began before"
        in cluster.status()["placement"]["unstartedEnd"]
    )
    cluster.answers.update({index: waiting(index, True) for index in range(2)})
    later = operator.now() + 120
    operator.now = lambda: later
    steps(8)
    jobs = [name for (plural, _, name) in cluster.kube.objects if plural == JOBS.plural]
    assert jobs == ["sft-p2"]
    assert [a.attempt for a in cluster.history().attempts] == [1]
    assert len(cluster.plans()) == 2

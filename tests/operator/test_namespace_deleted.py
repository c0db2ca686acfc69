"""A namespace that is being deleted takes its objects one by one and lets none be made: no crash, and no hot loop."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import KEY, Cluster, run_until_planned
from fake_kube import FakeKube
from operator_values import sidecar

from rtj_operator.api.names import FINALIZER
from rtj_operator.kube import EVENTS, JOBS, PODS, RTJ, Forbidden, Kind, KubeError, NotFound, Object
from rtj_operator.reconcile import Reconciler, TryLater


class LeavingKube(FakeKube):
    """Once `ends` says how, nothing can be made in the namespace."""

    ends = ""
    refused = 0

    async def create(
        self, kind: Kind, namespace: str | None, body: Object, *, dry_run: bool = False
    ) -> Object:
        if not self.ends:
            return await super().create(kind, namespace, body, dry_run=dry_run)
        self.refused += kind is not EVENTS
        raise self._answer(kind, body["metadata"]["name"])

    def _answer(self, kind: Kind, name: str) -> KubeError:
        if self.ends == "gone":
            sentence = 'namespaces "ns" not found'
            return NotFound(f"POST: 404 NotFound: {sentence}", status=404, sentence=sentence)
        sentence = (
            f'{kind.plural} "{name}" is forbidden: unable to create new content in namespace ns because it is '
            "being terminated"
        )
        return Forbidden(f"POST: 403 Forbidden: {sentence}", status=403, sentence=sentence)


@pytest.fixture
def kube() -> LeavingKube:
    return LeavingKube()


@pytest.fixture
def cluster(tmp_path: Path, kube: LeavingKube) -> Cluster:
    """A job that trains."""
    cluster = Cluster(tmp_path / "store")
    kube.objects, cluster.kube = cluster.kube.objects, kube
    cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
    return cluster


def looks(cluster: Cluster, operator: Reconciler, count: int) -> int:
    """So many looks; how many of them ask for a growing wait. Anything else that they raise is an error."""
    waits = 0
    for _ in range(count):
        try:
            cluster.step(operator)
        except TryLater:
            waits += 1
    return waits


def vanish(kube: LeavingKube, *kinds: Kind) -> None:
    for key in [k for k in kube.objects if k[0] in {kind.plural for kind in kinds}]:
        del kube.objects[key]


@pytest.mark.parametrize("ends", ["terminating", "gone"])
def test_a_job_whose_pods_go_with_their_namespace_waits_and_is_forgotten_with_it(
    cluster: Cluster, kube: LeavingKube, ends: str
) -> None:
    operator = cluster.operator()
    run_until_planned(cluster, operator)
    assert cluster.status()["phase"] == "Running"
    kube.ends = ends
    vanish(kube, PODS, JOBS)
    operator.memory.stale(KEY)
    with contextlib.suppress(TryLater):
        cluster.step(operator)
    looks(cluster, operator, 2)
    writes, refused = len(kube.log), kube.refused
    assert looks(cluster, operator, 4) == 4, "each one waits longer than the one before"
    assert kube.log[writes:] == [], "so that no write of its own wakes it up"
    assert kube.refused - refused == 4
    assert not operator.memory.changed(KEY, kube.objects[RTJ.plural, "ns", "sft"]) or ends == "gone"
    if ends == "terminating":
        assert "because it is being terminated" in cluster.status()["message"]
    vanish(kube, RTJ)
    assert looks(cluster, operator, 2) == 0
    assert operator.memory.keys_in({"ns"}) == []
    assert len(cluster.history().attempts) == 1


def test_a_job_with_its_finalizer_deletes_its_checkpoints_and_lets_the_namespace_go(
    cluster: Cluster, kube: LeavingKube
) -> None:
    raw: dict[str, Any] = kube.objects[RTJ.plural, "ns", "sft"]
    raw["spec"]["deletionPolicy"] = "Delete"
    operator = cluster.operator()
    run_until_planned(cluster, operator)
    assert raw["metadata"]["finalizers"] == [FINALIZER]
    kube.ends = "terminating"
    vanish(kube, PODS, JOBS)
    raw = kube.objects[RTJ.plural, "ns", "sft"]
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    kube.put(RTJ, raw)
    operator.memory.stale(KEY)
    assert looks(cluster, operator, 4) == 0
    assert kube.objects[RTJ.plural, "ns", "sft"]["metadata"]["finalizers"] == []
    assert kube.refused == 0, "nothing is made for a job that goes"

"""A status that the CRD refuses stops nothing that was decided before (O14); a Secret that cannot be one is named."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import Cluster, run_until_planned
from fake_kube import FakeKube

from rtj_operator.credentials import BadSecret, credentials_of
from rtj_operator.kube import EVENTS, JOBS, PODS, RTJ, SECRETS, Invalid, Kind, Object
from rtj_operator.reconcile import TryLater

SENTENCE = "ResumableTrainingJob sft is invalid: spec.template: failed rule: containers must have a name"


class TightenedKube(FakeKube):
    """Once `tight`, no status of any object passes validation."""

    tight = False

    async def write_status(self, kind: Kind, *args: Any, **kwargs: Any) -> Object:
        if self.tight:
            raise Invalid("PATCH: 422", status=422, sentence=SENTENCE)
        return await super().write_status(kind, *args, **kwargs)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A job that runs."""
    cluster = Cluster(tmp_path / "store")
    objects = cluster.kube.objects
    cluster.kube = TightenedKube()
    cluster.kube.objects = objects
    run_until_planned(cluster, cluster.operator())
    assert {p.order.value for p in cluster.plans()} == {"Run"}
    return cluster


def tighten(cluster: Cluster, **spec: Any) -> None:
    """The CRD is tightened, and the job edited."""
    job = cluster.kube.objects[(RTJ.plural, "ns", "sft")]
    job["spec"].update(spec)
    job["metadata"]["generation"] += 1
    cluster.kube.put(RTJ, job)
    assert isinstance(cluster.kube, TightenedKube)
    cluster.kube.tight = True


def kinds(cluster: Cluster) -> set[str]:
    return {plural for plural, _, _ in cluster.kube.objects}


def test_a_suspend_reaches_the_ranks_though_the_status_cannot_be_written(cluster: Cluster) -> None:
    tighten(cluster, suspend=True)
    with pytest.raises(TryLater, match="install the CRD of this version"):
        cluster.step(cluster.operator())
    assert {p.order.value for p in cluster.plans()} == {"SaveAndExit"}
    notes = [b["note"] for (plural, _, _), b in cluster.kube.objects.items() if plural == EVENTS.plural]
    assert [n for n in notes if SENTENCE in n], "users look at the job, not at the operator's log"


def test_what_was_given_up_is_deleted_though_the_status_cannot_be_written(cluster: Cluster) -> None:
    status = cluster.status()
    status["placement"]["released"] = True
    status["retryAt"] = "2999-01-01T00:00:00.000000Z"
    tighten(cluster)
    with pytest.raises(TryLater):
        cluster.step(cluster.operator())
    assert not kinds(cluster) & {JOBS.plural, PODS.plural}


def test_nothing_new_is_begun_that_the_status_cannot_record(cluster: Cluster) -> None:
    status = cluster.status()
    status["placement"]["released"] = True
    tighten(cluster)
    cluster.kube.log.clear()
    with pytest.raises(TryLater):
        cluster.step(cluster.operator())
    assert ("create", JOBS.plural, "sft-p2") not in cluster.kube.log
    assert ("delete", JOBS.plural, "sft-p1") in cluster.kube.log
    assert len(cluster.history().attempts) == 1


def secret(**values: bytes) -> Object:
    data = {key: base64.b64encode(value).decode() for key, value in values.items()}
    return {"metadata": {"name": "rtj-store", "namespace": "ns"}, "data": data}


def test_credentials_are_those_keys_of_the_secret_that_are_set() -> None:
    found = credentials_of(secret(AWS_ACCESS_KEY_ID=b"id", AWS_SECRET_ACCESS_KEY=b"a/b+c=", other=b"\xff"))
    assert found == {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "a/b+c="}


@pytest.mark.parametrize(
    ("value", "why"), [(b"key\n", "line end, as `echo`"), (b"\xff\xfe", "plain text"), (b"a\nb", "control")]
)
def test_a_secret_that_cannot_be_one_is_named_by_secret_and_key_and_never_shown(
    value: bytes, why: str
) -> None:
    with pytest.raises(BadSecret, match=f"Secret ns/rtj-store, key AWS_SECRET_ACCESS_KEY: .*{why}") as found:
        credentials_of(secret(AWS_SECRET_ACCESS_KEY=value))
    assert repr(value)[2:-1] not in str(found.value).partition("AWS_SECRET_ACCESS_KEY:")[2]


def test_a_secret_with_a_line_end_is_said_in_the_status(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "store")
    cluster.kube.put(SECRETS, secret(AWS_ACCESS_KEY_ID=b"id\n", AWS_SECRET_ACCESS_KEY=b"x"))
    with pytest.raises(TryLater):
        run_until_planned(cluster, cluster.operator())
    degraded = {c["type"]: c for c in cluster.status()["conditions"]}["Degraded"]
    assert degraded["reason"] == "StoreAccessDenied"
    assert "Secret ns/rtj-store, key AWS_ACCESS_KEY_ID" in degraded["message"]

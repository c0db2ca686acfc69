"""Fault orders on a job reach its sidecars only where installation, namespace and signature agree; else it says why."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import Cluster, Died

from rtj_operator.api import parse_job
from rtj_operator.faultgate import FaultGate, Handed, read_key
from rtj_operator.kube import EVENTS, JOBS, NAMESPACES, RTJ
from trainer_sidecar.contract.fault_order import (
    ENV_FAULT_ORDERS,
    FAULT_ANNOTATION,
    FAULT_LABEL,
    FAULT_LABEL_VALUE,
    FIRED_ANNOTATION,
    FaultOrder,
    from_text,
    sign,
)

KEY = b"0123456789abcdef0123456789abcdef"
ORDERS = (FaultOrder(point="before-claim", after=1), FaultOrder(point="store-write", times=5, seconds=2))
LABELS = {FAULT_LABEL: FAULT_LABEL_VALUE}


def signed(key: bytes = KEY, name: str = "sft", seconds: int = 600) -> str:
    return sign(key, "ns", name, ORDERS, int(time.time()) + seconds)


def placed(folder: Path, text: str, labels: dict[str, str], key: bytes | None) -> Cluster:
    """A cluster whose operator has placed a job that carries orders."""
    cluster = Cluster(folder)
    cluster.kube.put(NAMESPACES, {"metadata": {"name": "ns", "labels": labels}})
    job = cluster.kube.objects[(RTJ.plural, "ns", "sft")]
    job["metadata"]["annotations"] = {FAULT_ANNOTATION: text}
    operator = cluster.operator(fault_key=key)
    for _ in range(3):
        cluster.step(operator)
    return cluster


def handed(cluster: Cluster, job: str = "sft-p1") -> tuple[FaultOrder, ...]:
    body: dict[str, Any] = cluster.kube.objects[(JOBS.plural, "ns", job)]
    sidecar = body["spec"]["template"]["spec"]["initContainers"][0]
    values = {e["name"]: e.get("value", "") for e in sidecar["env"]}
    return from_text(values.get(ENV_FAULT_ORDERS, ""))


def told(cluster: Cluster) -> dict[str, str]:
    events = [b for (plural, _, _), b in cluster.kube.objects.items() if plural == EVENTS.plural]
    return {e["reason"]: e["note"] for e in events if e["reason"].startswith("Faults")}


def test_orders_reach_the_sidecars_of_the_first_placement_and_an_event_tells_them(tmp_path: Path) -> None:
    cluster = placed(tmp_path, signed(), LABELS, KEY)
    assert handed(cluster) == ORDERS
    ((reason, note),) = told(cluster).items()
    assert reason == "FaultsArmed"
    assert "before-claim in pod 0, 1 times after 1; store-write in pod 0, 5 times after 0, 2 s each" in note


@pytest.mark.parametrize(
    ("text", "labels", "key", "why"),
    [
        (signed(), LABELS, None, "faultInjection.enabled"),
        (signed(), {}, KEY, f"does not carry the label {FAULT_LABEL}={FAULT_LABEL_VALUE}"),
        (signed(), {FAULT_LABEL: "yes"}, KEY, "does not carry the label"),
        (signed(b"another key of this length"), LABELS, KEY, "not signed with this installation's key for ns/sft"),
        (signed(name="other"), LABELS, KEY, "not signed with this installation's key for ns/sft"),
        (signed(seconds=-1), LABELS, KEY, "expired"),
        (signed(seconds=86400), LABELS, KEY, "at most 3600"),
        ("__import__('os')", LABELS, KEY, "they are none"),
    ],
)  # fmt: skip
def test_without_each_of_them_nothing_fires_and_a_warning_says_what_is_missing(
    tmp_path: Path, text: str, labels: dict[str, str], key: bytes | None, why: str
) -> None:
    cluster = placed(tmp_path, text, labels, key)
    assert handed(cluster) == ()
    assert "RTJ_FAULT" not in str(cluster.kube.objects[(JOBS.plural, "ns", "sft-p1")])
    ((reason, note),) = told(cluster).items()
    assert reason == "FaultsRefused"
    assert why in note


def test_orders_hold_for_the_first_placement_so_that_later_pods_do_not_fire_them_again(
    tmp_path: Path,
) -> None:
    cluster = placed(tmp_path, signed(), LABELS, KEY)
    job = parse_job(cluster.kube.objects[(RTJ.plural, "ns", "sft")])
    gate = FaultGate(cluster.kube, KEY)
    assert asyncio.run(gate.orders_for(job, 1)).orders == ORDERS
    assert asyncio.run(gate.orders_for(job, 2)) == Handed()


def test_an_operator_that_may_not_read_the_namespace_places_the_job_without_faults(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.kube.denied[("get", "namespaces")] = ""
    job = cluster.kube.objects[(RTJ.plural, "ns", "sft")]
    job["metadata"]["annotations"] = {FAULT_ANNOTATION: signed()}
    operator = cluster.operator(fault_key=KEY)
    for _ in range(3):
        cluster.step(operator)
    assert handed(cluster) == ()
    assert "may not read namespace ns" in told(cluster)["FaultsRefused"]


def test_an_operator_dies_as_often_as_ordered_and_the_job_is_placed_once(tmp_path: Path) -> None:
    orders = (FaultOrder(point="after-status-write", times=2), FaultOrder(point="after-job-create"))
    cluster = Cluster(tmp_path)
    cluster.kube.put(NAMESPACES, {"metadata": {"name": "ns", "labels": LABELS}})
    job = cluster.kube.objects[(RTJ.plural, "ns", "sft")]
    job["metadata"]["annotations"] = {
        FAULT_ANNOTATION: sign(KEY, "ns", "sft", orders, int(time.time()) + 600)
    }
    deaths = []
    for _ in range(8):
        try:
            cluster.step(cluster.operator(fault_key=KEY))
        except Died as death:
            deaths.append(str(death))
    assert sorted(deaths) == ["after-job-create", "after-status-write", "after-status-write"]
    assert handed(cluster) == ()
    assert [name for verb, kind, name in cluster.kube.log if (verb, kind) == ("create", "jobs")] == ["sft-p1"]
    assert cluster.status()["phase"] in ("Starting", "Pending", "Running")


@pytest.mark.parametrize(
    "note", ['{"after-status-write": -1000}', "[]", "nonsense", '{"after-status-write": "0"}']
)
def test_an_operator_does_not_die_by_a_count_that_it_did_not_write(tmp_path: Path, note: str) -> None:
    orders = (FaultOrder(point="after-status-write"),)
    cluster = Cluster(tmp_path)
    cluster.kube.put(NAMESPACES, {"metadata": {"name": "ns", "labels": LABELS}})
    cluster.kube.objects[(RTJ.plural, "ns", "sft")]["metadata"]["annotations"] = {
        FAULT_ANNOTATION: sign(KEY, "ns", "sft", orders, int(time.time()) + 600),
        FIRED_ANNOTATION: note,
    }
    for _ in range(3):
        cluster.step(cluster.operator(fault_key=KEY))


def test_a_key_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("short")
    with pytest.raises(ValueError, match="at least 16"):
        read_key(str(file))
    file.write_bytes(KEY + b"\n")
    assert read_key(str(file)) == KEY
    assert read_key("") is None

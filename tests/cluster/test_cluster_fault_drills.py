"""`rtj drill faults` as a user runs it: a fault in the store, one on order in a sidecar, a report that proves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hack.cluster_world import NAMESPACE, World
from hack.fault_drills import campaign
from trainer_sidecar.contract.fault_order import FAULT_LABEL, FAULT_LABEL_VALUE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
DRILLS = ("D1", "D3")
"""One that needs an order in the sidecar and loses its pod, and one that the store is broken for."""


def test_a_campaign_injects_proves_measures_and_reports(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", world.cluster.variables["KUBECONFIG"])
    world.cluster.kubectl("label", "namespace", NAMESPACE, f"{FAULT_LABEL}={FAULT_LABEL_VALUE}")
    world.install(faultInjection={"enabled": True})
    limits = ["--rpo-seconds", "600", "--rto-seconds", "600"]
    code = campaign(world, [*DRILLS, "-n", NAMESPACE, *limits], tmp_path)
    assert code == 0, capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(d["id"], d["verdict"], d["reasons"]) for d in report["drills"]] == [
        (name, "passed", []) for name in DRILLS
    ]
    frozen, flipped = (d["seen"] for d in report["drills"])
    assert "flipped byte" in flipped["fired"]
    assert flipped["lost"]["steps"] > 0
    assert "frozen at after-shard-put" in frozen["fired"]
    assert all(d["seen"]["recoverySeconds"] > 0 for d in report["drills"])
    assert "Passed: 2 passed" in (tmp_path / "report.html").read_text()
    world.cluster.kubectl("label", "namespace", NAMESPACE, f"{FAULT_LABEL}-")

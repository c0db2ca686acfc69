"""`rtj drill faults` as a user runs it: a fault in the store, one on order in a sidecar, a report that proves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cluster_drills import Drill, document_of, drill_of, with_witness

from hack.cluster_world import NAMESPACE, World
from hack.fault_drills import campaign
from trainer_sidecar import cli
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


def test_a_drill_restores_in_spite_of_the_faults_in_its_spec_and_counts_them(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fault is met by real sidecars and ranks; the signature is made by the command that a user has."""
    kubeconfig = world.cluster.variables["KUBECONFIG"]
    world.cluster.kubectl(
        "label", "--overwrite", "namespace", NAMESPACE, f"{FAULT_LABEL}={FAULT_LABEL_VALUE}"
    )
    world.install(faultInjection={"enabled": True})
    document = world.document(
        "rough", nodes=2, ranks=1, steps=4000, interval=8, env={"TEST_PACE": "/ledger/pace"}
    )
    document["spec"]["checkpoint"]["retention"] = {"keepLast": 100}
    job = world.job(document)
    job.pace(0.1)
    with_witness(job, beyond=1)
    faults = [
        {"point": "store-read", "after": 1, "times": 3},
        {"point": "rank-restored", "pod": 1},
        {"point": "rank-restores", "seconds": 1},
    ]
    file = tmp_path / "drill.yaml"
    drill = document_of("rough-restore", jobName=job.name, nodes=2, faults=faults)
    file.write_text(json.dumps(drill))
    capsys.readouterr()
    assert cli.main(["drill", "sign", str(file), "-n", NAMESPACE, "--kubeconfig", kubeconfig]) == 0
    world.kubectl("apply", "-f", "-", stdin=capsys.readouterr().out)
    status = Drill(world, "rough-restore", job).wait_end()
    assert (status["phase"], status["reason"], status["faultsFired"]) == ("Passed", "Matched", 5), status
    assert status["message"].endswith("5 faults happened")
    unsigned = drill_of(job, "unsigned", nodes=2, faults=faults).wait_end()
    assert (unsigned["phase"], unsigned["reason"]) == ("Failed", "FaultsRefused"), unsigned
    assert [a.attempt for a in job.attempts()] == [1], "the run itself was never touched"
    world.kubectl("delete", "rtj", job.name)
    world.cluster.kubectl("label", "namespace", NAMESPACE, f"{FAULT_LABEL}-")

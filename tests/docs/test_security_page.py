"""docs/security.md says what the chart grants, and no credential reaches the trainer."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.pods import Placement, PodSettings, build_job

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "monitoring"))

import chart  # noqa: E402

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def granted(rules: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Verbs by resource."""
    found: dict[str, set[str]] = defaultdict(set)
    for rule in rules:
        for resource in rule["resources"]:
            found[resource] |= set(rule["verbs"])
    return dict(found)


def told() -> dict[str, set[str]]:
    """The table of the page: verbs by resource. A cell that has two resources has their verbs in the same order."""
    table = PAGE.partition("## The operator's rights")[2].partition("\n## ")[0]
    found: dict[str, set[str]] = defaultdict(set)
    for line in table.splitlines():
        if not line.startswith("| ") or line.startswith(("| resource", "| ---")):
            continue
        resources, verbs = (cell.strip() for cell in line.strip("|").split("|")[:2])
        names = re.findall(r"`([^`]+)`", resources)
        groups = [{verb.partition(" ")[0] for verb in re.split(r", ", part)} for part in verbs.split("; ")]
        for index, name in enumerate(names):
            found[name] |= groups[min(index, len(groups) - 1)] if len(names) > 1 else set().union(*groups)
    return dict(found)


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    """The chart for one namespace, with all that widens its rights."""
    return chart.template(
        chart.helm(), "namespaces={ml}", "faultInjection.enabled=true", "store.allowedSecrets={b}"
    )


def test_the_table_of_rights_is_what_the_chart_grants_in_a_namespace(objects: list[dict[str, Any]]) -> None:
    (role,) = [o for o in objects if o["kind"] == "Role" and o["metadata"]["namespace"] == "ml"]
    rights = granted(role["rules"])
    custom = ("resumabletrainingjobs", "resumedrills")
    assert {rights.pop(f"{name}/status") == {"patch"} for name in custom} == {True}
    assert {rights.pop(f"{name}/finalizers") == {"update"} for name in custom} == {True}
    page = told()
    assert page.pop("status") == {"patch"}
    assert page.pop("finalizers") == {"update"}
    assert page == rights
    (secrets,) = [rule for rule in role["rules"] if rule["resources"] == ["secrets"]]
    assert secrets["resourceNames"] == ["rtj-store", "b"]


def test_outside_namespaces_only_nodes_and_the_list_of_pods_are_read(objects: list[dict[str, Any]]) -> None:
    (role,) = [o for o in objects if o["kind"] == "ClusterRole"]
    assert granted(role["rules"]) == {"nodes": {"get", "list"}, "pods": {"list"}}
    assert "`nodes` get and list, `pods` list" in PAGE


def test_no_credential_reaches_the_trainer_and_the_sidecar_gets_three_entries_by_name() -> None:
    raw = yaml.safe_load((ROOT / "examples" / "pretrain" / "job.yaml").read_text())
    raw["metadata"] |= {"uid": "u", "namespace": "ml"}
    job = parse_job(raw)
    built = build_job(job, effective(job, OperatorDefaults()), Placement(1, 2), PodSettings("sidecar:1"))
    pod = built["spec"]["template"]["spec"]
    (trainer,), (sidecar,) = pod["containers"], pod["initContainers"]
    assert "secret" not in json.dumps(trainer).lower()
    assert "AWS_" not in json.dumps(trainer)
    assert not any("secret" in volume for volume in pod["volumes"])
    assert pod["automountServiceAccountToken"] is False
    keys = [
        e["valueFrom"]["secretKeyRef"]["key"]
        for e in sidecar["env"]
        if "secretKeyRef" in e.get("valueFrom", {})
    ]
    assert keys == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
    assert "envFrom" not in sidecar

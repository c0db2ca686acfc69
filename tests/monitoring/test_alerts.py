"""Each alert fires on what it is for, stays quiet otherwise, and has a runbook. promtool judges the rendered rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import ROOT, run, template

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
JOB = 'job_namespace="ml",job_name="sft"'
VALUES = (
    "monitoring.alerts.enabled=true",
    "monitoring.alerts.recoveryPointSeconds=600",
    "monitoring.alerts.verifiedRecoveryPointSeconds=3600",
)
# By alert: a series that must raise it, and one that must not, one value a minute for an hour.
CASES: dict[str, tuple[str, str, str]] = {
    "RTJRecoveryPointTooOld": (
        f'rtj_recovery_point_seconds{{{JOB},point="committed"}}',
        "0+60x60",
        "500x60",
    ),
    "RTJVerifiedPointTooOld": (
        f'rtj_recovery_point_seconds{{{JOB},point="verified"}}',
        "3000+60x60",
        "3000x60",
    ),
    "RTJDrillFailed": (f"rtj_drill_passed{{{JOB}}}", "1x30 0x30", "1x60"),
    "RTJCommitsFailing": (f'rtj_job_degraded{{{JOB},reason="SavesFailing"}}', "1x60", "1x2 _x58"),
    "RTJRestoresFailing": (f"rtj_job_restore_failures_total{{{JOB}}}", "0x30 1x30", "3x60"),
    "RTJChecksumFailures": (f"checkpoint_checksum_failures_total{{{JOB}}}", "0x30 2x30", "0x60"),
    "RTJResumeDiffers": (f"rtj_resume_verified{{{JOB}}}", "0x60", "1x60"),
    "RTJNoProgress": (f"rtj_job_failures_without_progress{{{JOB}}}", "2x60", "1x60"),
    "RTJSaveSlowerThanInterval": (f'checkpoint_inprogress_count{{{JOB},pod="a"}}', "1x60", "0 1x20 0x40"),
    "RTJGraceTooShort": (f'rtj_job_degraded{{{JOB},reason="GraceTooShort"}}', "1x60", "0x60"),
    "RTJOperatorBehind": ("rtj_operator_queue_age_seconds", "90x60", "5x60"),
    "RTJOperatorCutOff": ("rtj_operator_unread_seconds", "0+60x60", "50x60"),
    "RTJNoOperator": ("rtj_operator_leader", "0x60", "1x60"),
}


@pytest.fixture(scope="module")
def rules(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    objects = template(helm, *VALUES)
    spec = next(b for b in objects if b["kind"] == "PrometheusRule")["spec"]
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def alerts(rules: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]]


def test_every_alert_has_a_case_here_and_a_section_in_the_runbooks(rules: Path) -> None:
    names = [rule["alert"] for rule in alerts(rules)]
    assert sorted(names) == sorted(CASES)
    sections = (ROOT / "docs" / "runbooks.md").read_text()
    assert [n for n in names if f"\n## {n}\n" not in sections] == []
    assert all(
        rule["annotations"]["runbook_url"].endswith("#" + rule["alert"].lower()) for rule in alerts(rules)
    )


def test_each_fires_on_what_it_is_for_and_on_nothing_else(rules: Path) -> None:
    run("promtool", "check", "rules", str(rules))
    found = {rule["alert"]: rule for rule in alerts(rules)}
    groups = [_group(found[name], series, raised, quiet) for name, (series, raised, quiet) in CASES.items()]
    file = rules.with_name("tests.yaml")
    file.write_text(
        yaml.safe_dump(
            {
                "rule_files": [rules.name],
                "evaluation_interval": "1m",
                "tests": [test for pair in groups for test in pair],
            }
        )
    )
    said = run("promtool", "test", "rules", str(file))
    assert "SUCCESS" in said


def test_a_job_with_drills_is_measured_by_the_newest_proven_checkpoint(helm: str, tmp_path: Path) -> None:
    objects = template(helm, "monitoring.alerts.enabled=true", "monitoring.alerts.recoveryPointSeconds=600")
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(next(b for b in objects if b["kind"] == "PrometheusRule")["spec"]))
    name = "RTJVerifiedPointTooOld"
    rule = next(r for r in alerts(rules) if r["alert"] == name)
    series = f'rtj_recovery_point_seconds{{{JOB},point="verified"}}'
    labels = {"severity": "warning", "job_namespace": "ml", "job_name": "sft", "point": "verified"}
    expected = [{"exp_labels": labels, "exp_annotations": _annotations(rule, labels)}]
    late = _test(name, series, "3000+60x60", expected)
    early = _test(name, series, "600+60x59", [])
    for drilled in (late, early):
        drilled["input_series"].append(
            {"series": f"rtj_drill_interval_seconds{{{JOB}}}", "values": "1800x60"}
        )
    none = _test(name, series, "3000+60x60", [])
    file = tmp_path / "tests.yaml"
    tests = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": [late, early, none]}
    file.write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in run("promtool", "test", "rules", str(file))


def _group(rule: dict[str, Any], series: str, raised: str, quiet: str) -> list[dict[str, Any]]:
    labels = {"severity": rule["labels"]["severity"]}
    if "job_name" in series:
        labels |= {"job_namespace": "ml", "job_name": "sft"}
    for extra in ("point", "reason", "pod"):
        if f'{extra}="' in series:
            labels[extra] = series.split(f'{extra}="')[1].split('"')[0]
    name = rule["alert"]
    expected = [{"exp_labels": labels, "exp_annotations": _annotations(rule, labels)}]
    return [_test(name, series, raised, expected), _test(name, series, quiet, [])]


def _annotations(rule: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    """What a person reads, for the value at the end of the series."""
    values = {
        "RTJRecoveryPointTooOld": "1h 0m 0s",
        "RTJVerifiedPointTooOld": "1h 50m 0s",
        "RTJNoProgress": "2",
    }
    told = dict(rule["annotations"])
    text = told["summary"].replace("{{ $labels.job_namespace }}", labels.get("job_namespace", ""))
    text = text.replace("{{ $labels.job_name }}", labels.get("job_name", ""))
    for written in ("{{ humanizeDuration $value }}", "{{ $value }}"):
        text = text.replace(written, values.get(rule["alert"], ""))
    return {**told, "summary": text}


def _test(name: str, series: str, values: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values}],
        "alert_rule_test": [{"eval_time": "60m", "alertname": name, "exp_alerts": expected}],
    }

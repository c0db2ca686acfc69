"""The Grafana dashboard: how far each job is from its restore points, where the time went, what happened when.

Made here and not drawn by hand, so that every panel has its unit, and a test can run every query.
"""

import json
from dataclasses import dataclass
from typing import Any

_JOB = 'job_namespace=~"$namespace",job_name=~"$job"'
_SAVES = "checkpoint_save_duration_seconds_bucket"
_STAGING = "checkpoint_async_staging_seconds_bucket"
_RESTORES = "checkpoint_restore_duration_seconds_bucket"


@dataclass(frozen=True)
class Panel:
    """One graph: (query, legend) pairs in one unit."""

    title: str
    unit: str
    text: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


def _quantile(quantile: float, bucket: str) -> str:
    return f"histogram_quantile({quantile}, sum by (le, job_name) (rate({bucket}{{{_JOB}}}[10m])))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "How much would be lost now": (
        Panel(
            "Seconds to the newest committed restore point",
            "s",
            "Training that a failure now would repeat.",
            ((f'rtj_recovery_point_seconds{{{_JOB},point="committed"}}', "{{job_name}}"),),
        ),
        Panel(
            "Seconds to the newest verified restore point",
            "s",
            "To the newest one that a resume, a drill or a deep check has proven.",
            ((f'rtj_recovery_point_seconds{{{_JOB},point="verified"}}', "{{job_name}}"),),
        ),
        Panel(
            "Samples at risk",
            "short",
            "Samples since the newest restore points.",
            ((f"rtj_recovery_point_samples{{{_JOB}}}", "{{job_name}} {{point}}"),),
        ),
    ),
    "What drills have shown": (
        Panel(
            "Recovery time",
            "s",
            "Measured by the newest drill, from the decision to the first step, scheduling included.",
            ((f"rtj_drill_recovery_seconds{{{_JOB}}}", "{{job_name}}"),),
        ),
        Panel(
            "Newest drill passed",
            "short",
            "1 when it has passed, 0 when it has failed.",
            ((f"rtj_drill_passed{{{_JOB}}}", "{{job_name}}"),),
        ),
        Panel(
            "Since the newest drill",
            "s",
            "Of a job without drills there is nothing here.",
            ((f"time() - rtj_drill_ended_timestamp_seconds{{{_JOB}}}", "{{job_name}}"),),
        ),
    ),
    "What happened when": (
        Panel(
            "Phase",
            "short",
            "1 for the phase that a job is in.",
            ((f"rtj_job_phase{{{_JOB}}}", "{{job_name}} {{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Attempts, failures and losses in an hour",
            "short",
            "Losses are preemptions, evictions and lost nodes; they never use up the budget of failures.",
            (
                (f"increase(rtj_job_attempts_total{{{_JOB}}}[1h])", "{{job_name}} attempts"),
                (f"increase(rtj_job_failures_total{{{_JOB}}}[1h])", "{{job_name}} failures"),
                (f"increase(rtj_job_preemptions_total{{{_JOB}}}[1h])", "{{job_name}} losses"),
            ),
        ),
        Panel(
            "Step of the newest commit",
            "short",
            "Flat while training goes on means that saves do not commit.",
            ((f"rtj_last_committed_step{{{_JOB}}}", "{{job_name}}"),),
        ),
    ),
    "Where the time went": (
        Panel(
            "Seconds from the end of an attempt to the next one's first step",
            "s",
            "The newest attempt, by phase.",
            ((f'rtj_attempt_seconds{{{_JOB},phase!="total"}}', "{{job_name}} {{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Restore",
            "s",
            "From the opening of a restore point to the last rank's close.",
            (
                (_quantile(0.5, _RESTORES), "{{job_name}} median"),
                (_quantile(0.95, _RESTORES), "{{job_name}} 95 %"),
            ),
        ),
        Panel(
            "Failures to restore",
            "short",
            "Requests by reason, and bytes that twice did not have their digest.",
            (
                (f"increase(checkpoint_restore_failures_total{{{_JOB}}}[1h])", "{{job_name}} {{reason}}"),
                (f"increase(checkpoint_checksum_failures_total{{{_JOB}}}[1h])", "{{job_name}} checksums"),
            ),
        ),
    ),
    "Saves": (
        Panel(
            "Save, from staging to commit",
            "s",
            "In the background of training.",
            ((_quantile(0.5, _SAVES), "{{job_name}} median"), (_quantile(0.95, _SAVES), "{{job_name}} 95 %")),
        ),
        Panel(
            "Staging: training stands still",
            "s",
            "The copy into host memory.",
            (
                (_quantile(0.5, _STAGING), "{{job_name}} median"),
                (_quantile(0.95, _STAGING), "{{job_name}} 95 %"),
            ),
        ),
        Panel(
            "Bytes to the store",
            "Bps",
            "Shards, all pods of a job.",
            ((f"sum by (job_name) (rate(checkpoint_bytes_total{{{_JOB}}}[5m]))", "{{job_name}}"),),
        ),
    ),
    "Operator": (
        Panel(
            "Reconcile",
            "s",
            "99 % of reconciles are faster.",
            (
                (
                    "histogram_quantile(0.99, sum by (le) (rate(rtj_operator_reconcile_seconds_bucket[5m])))",
                    "99 %",
                ),
            ),
        ),
        Panel(
            "Jobs that wait for a worker",
            "short",
            "And for how many seconds the oldest one.",
            (("rtj_operator_queue_depth", "jobs"), ("rtj_operator_queue_age_seconds", "oldest, seconds")),
        ),
        Panel(
            "Fence and pick",
            "s",
            "Against the store, when an attempt starts.",
            (
                (
                    "histogram_quantile(0.95, sum by (le) (rate(rtj_operator_fence_seconds_bucket[30m])))",
                    "95 %",
                ),
            ),
        ),
    ),
}


def queries() -> list[str]:
    """Every query with the variables as wildcards."""
    found = [query for panels in ROWS.values() for panel in panels for query, _ in panel.queries]
    return [q.replace("$namespace", ".*").replace("$job", ".*") for q in found]


def render() -> str:
    """The dashboard's JSON."""
    panels: list[dict[str, Any]] = []
    for row, (title, graphs) in enumerate(ROWS.items()):
        top = row * 9
        panels.append(
            {"type": "row", "title": title, "id": 100 + row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}}
        )
        for column, panel in enumerate(graphs):
            place = {"h": 8, "w": 8, "x": 8 * column, "y": top + 1}
            panels.append({"id": 1 + row * 10 + column, "gridPos": place, **_panel(panel)})
    body = {
        "title": "Resumable training",
        "uid": "resumable-training",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "tags": ["training"],
        "templating": {
            "list": [_source(), _variable("namespace", ""), _variable("job", '{job_namespace=~"$namespace"}')]
        },
        "panels": panels,
    }
    return json.dumps(body, indent=1) + "\n"


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(65 + i), "expr": query, "legendFormat": legend}
        for i, (query, legend) in enumerate(panel.queries)
    ]
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.stacked else {}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, among: str) -> dict[str, Any]:
    label = {"namespace": "job_namespace", "job": "job_name"}[name]
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f"label_values(rtj_job_phase{among}, {label})",
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
    }

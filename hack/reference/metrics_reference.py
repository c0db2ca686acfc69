"""Every metric that operator and sidecars serve, from the registries that serve them."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from rtj_operator.drills.metrics import DrillMetrics
from rtj_operator.job_metrics import JobMetrics
from rtj_operator.metrics import OperatorMetrics
from trainer_sidecar.sidecar.metrics import Metrics


def page() -> str:
    """The tables."""
    return "\n".join(
        [
            "# Metrics",
            "",
            "Generated from the code by `make generate`. Names are as a query sees them.",
            "",
            "## Of each job, from the operator",
            "",
            "Port `metrics` of the operator. They outlive the job's pods; labels `job_namespace` and `job_name`.",
            "",
            *_table(_of_jobs()),
            "",
            "## Of the operator",
            "",
            *_table(m for m in OperatorMetrics().registry.collect() if m.name not in _names()),
            "",
            "## Of each pod, from its sidecar",
            "",
            "Port `rtj-status` of every pod of a job.",
            "",
            *_table(Metrics().registry.collect()),
            "",
        ]
    )


def _of_jobs() -> Iterable[Metric]:
    registry = CollectorRegistry()
    registry.register(JobMetrics())
    registry.register(DrillMetrics())
    return registry.collect()


def _names() -> set[str]:
    return {m.name for m in _of_jobs()}


def _table(families: Iterable[Metric]) -> list[str]:
    rows = []
    for family in sorted(families, key=lambda m: m.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {family.documentation.rstrip('.')} |")
    return ["| metric | type | meaning |", "| --- | --- | --- |", *rows]

"""What the newest drill of each job has shown, as metrics: a recovery time that was measured, and an alert when a drill
fails. Made afresh from all drills once a minute, so that nothing outlives its drill or is lost with the process.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rtj_operator.api import InvalidJobError
from rtj_operator.api.drill import DrillPhase, ResumeDrill, parse_drill
from rtj_operator.kube import Object
from rtj_operator.queue import Key

_JOB = ["job_namespace", "job_name"]


class DrillMetrics(Collector):
    """The newest drill that has ended, by job. Used from one event loop."""

    def __init__(self) -> None:
        self._newest: dict[Key, ResumeDrill] = {}

    def show(self, drills: Iterable[Object]) -> None:
        """All drills that exist. One of another schema says nothing."""
        newest: dict[Key, ResumeDrill] = {}
        for raw in drills:
            try:
                drill = parse_drill(raw)
            except InvalidJobError:
                continue
            key = (drill.metadata.namespace, drill.spec.job_name)
            if drill.ended and (key not in newest or _ended(newest[key]) < _ended(drill)):
                newest[key] = drill
        self._newest = newest

    def collect(self) -> Iterator[Metric]:
        """All families, also without a drill."""
        passed = GaugeMetricFamily(
            "rtj_drill_passed", "1 if the job's newest drill passed, else 0", labels=_JOB
        )
        ended = GaugeMetricFamily(
            "rtj_drill_ended_timestamp_seconds",
            "Unix time at which the job's newest drill ended",
            labels=_JOB,
        )
        recovery = GaugeMetricFamily(
            "rtj_drill_recovery_seconds",
            "Recovery time that the job's newest drill measured: from the decision to the first step",
            labels=_JOB,
        )
        for key, drill in self._newest.items():
            passed.add_metric([*key], float(drill.status.result is DrillPhase.PASSED))
            ended.add_metric([*key], _ended(drill))
            if drill.status.recovery_seconds is not None:
                recovery.add_metric([*key], drill.status.recovery_seconds)
        yield from (passed, ended, recovery)


def _ended(drill: ResumeDrill) -> float:
    return drill.status.ended_at.timestamp() if drill.status.ended_at is not None else 0.0

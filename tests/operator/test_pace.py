"""How often a job is looked at when many are: what a watch brings never waits, what nobody brings waits its turn."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import KEY, Cluster, run_until_planned
from operator_values import NOW, Situation, sidecar

from rtj_operator.kube import EVENTS, PODS, RTJ, Kind, Object
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.queue import KeyQueue
from rtj_operator.runtime import Runtime
from trainer_sidecar.contract.status import PhaseTimes, SidecarStatus


@pytest.mark.parametrize(
    ("busy", "asked", "given"),
    [(10, 1.0, 1.0), (900, 1.0, 30.0), (900, 60.0, 60.0), (900, 0.1, 0.1), (900, None, None)],
)
def test_jobs_that_start_all_at_once_are_looked_at_less_often(
    tmp_path: Path, busy: int, asked: float | None, given: float | None
) -> None:
    cluster = Cluster(tmp_path)
    operator = cluster.operator()
    runtime = Runtime(cluster.kube, operator, operator.observer.graves, OperatorMetrics())
    for number in range(busy):
        runtime.queue.add_after(("ns", f"job-{number}"), 5.0)
    assert runtime._paced(asked) == given


class Process:
    """The queue and the workers of a process on a clock of the test's own; every write comes back as its event."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looks = 0.0, 0
        self.cluster = Cluster(folder)
        self.cluster.clock = lambda: self.now
        operator = self.cluster.operator()
        self.cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
        run_until_planned(self.cluster, operator)
        queue = KeyQueue(lambda: self.now, lambda: 0.5)
        self.runtime = Runtime(
            self.cluster.kube, operator, operator.observer.graves, OperatorMetrics(), queue=queue
        )
        put = self.cluster.kube.put

        def putting(kind: Kind, body: Object) -> Object:
            self.event(put(kind, body))
            return body

        monkeypatch.setattr(self.cluster.kube, "put", putting)

    def event(self, body: Object) -> None:
        self.runtime._look_again(KEY, copy.deepcopy(body))

    def pass_by(self, seconds: float, says: Callable[[int], SidecarStatus]) -> None:
        """Workers work; pod 0's sidecar answers each look as `says` tells by its number."""
        end = self.now + seconds
        while (wait := self.runtime.queue.next_due()) is not None and self.now + wait < end:
            self.now += wait + 0.001
            if (key := self.runtime.queue.take()) is not None:
                self.looks += 1
                self.cluster.answers[0] = says(self.looks)
                asyncio.run(self.runtime._one(key))
        self.now = end

    @property
    def due(self) -> bool:
        return len(self.runtime.queue) == 1


FICKLE: dict[str, Callable[[int], dict[str, Any]]] = {
    "first step": lambda n: {} if n % 2 else {"phases": PhaseTimes()},
    "commit": lambda n: {"last_committed": Situation(now=NOW)._commit(n, n + 7)},
    "proof": lambda n: {
        "last_committed": Situation(now=NOW)._commit(5, 7),
        "last_verified": Situation(now=NOW)._commit(n, n),
    },
    "store's error": lambda n: {"consecutive_failures": 3 + n, "store_error": f"error {n}"},
}


@pytest.mark.parametrize("what", FICKLE)
def test_a_sidecar_that_says_another_thing_each_time_is_asked_no_more_often_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each answer is a status write, each write an event, and no event of that kind is worth a look at once."""
    process = Process(tmp_path, monkeypatch)
    process.cluster.kube.log.clear()
    process.runtime.queue.add(KEY)
    process.pass_by(30.0, lambda n: sidecar(0, epoch=1).model_copy(update=FICKLE[what](n)))
    assert 5 <= process.looks <= 35
    written = [(verb, kind) for verb, kind, _ in process.cluster.kube.log if kind != EVENTS.plural]
    assert set(written) == {("status", RTJ.plural)}
    assert len(written) <= process.looks


def test_what_a_user_or_kubernetes_does_is_looked_at_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(tmp_path, monkeypatch)
    process.runtime.queue.add(KEY)
    kube = process.cluster.kube

    def rest() -> None:
        process.pass_by(1.0, lambda _: sidecar(0, epoch=1))
        assert not process.due

    job = kube.objects[RTJ.plural, *KEY]
    for change in ({"generation": 7}, {"finalizers": ["a/b"]}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}):
        rest()
        job["metadata"] |= change
        kube.put(RTJ, job)
        assert process.due, change
    rest()
    kube.put(PODS, kube.objects[PODS.plural, "ns", "sft-p1-1"])
    assert process.due
    rest()
    kube.put(RTJ, job)
    assert not process.due, "only the status can have changed"

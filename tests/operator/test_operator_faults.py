"""A fault of the operator's own that one job meets is said in that job, and taken back when it passes.

The status said "Restoring ..." for ever while each look at the job ended in an exception that only the log told.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import KEY, Cluster, assert_one_of_everything, run_until_planned
from operator_values import sidecar

from rtj_operator import reconcile
from rtj_operator.kube import EVENTS, RTJ
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.queue import KeyQueue
from rtj_operator.reconcile import Reconciler
from rtj_operator.runtime import Runtime


class Process:
    """A runtime whose looks at the job the test takes, and a decision that fails while `fault` is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.fault = Cluster(folder), None
        self.operator: Reconciler = self.cluster.operator()
        self.runtime = Runtime(
            self.cluster.kube,
            self.operator,
            self.operator.observer.graves,
            OperatorMetrics(),
            queue=KeyQueue(lambda: 0.0, lambda: 0.5),
        )
        decide = reconcile.decide

        def deciding(*given: Any) -> Any:
            if self.fault is not None:
                raise self.fault
            return decide(*given)

        monkeypatch.setattr(reconcile, "decide", deciding)

    fault: Exception | None

    def look(self) -> None:
        asyncio.run(self.runtime._one(KEY))
        self.cluster.pods_come_up()

    def job(self) -> dict[str, Any]:
        return self.cluster.kube.objects[RTJ.plural, "ns", "sft"]

    def degraded(self) -> dict[str, Any]:
        return next(c for c in self.job()["status"]["conditions"] if c["type"] == "Degraded")

    def events(self) -> list[dict[str, Any]]:
        kube = self.cluster.kube
        found = [b for (plural, _, _), b in kube.objects.items() if plural == EVENTS.plural]
        return [b for b in found if b["reason"] == "OperatorFailing"]


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(tmp_path / "store", monkeypatch)


def test_a_new_job_at_which_the_operator_fails_says_so_and_goes_on_when_it_passes(process: Process) -> None:
    process.fault = OverflowError("Python int too large to convert to C int")
    process.look()
    status = process.job()["status"]
    assert (status["phase"], status["reason"]) == ("Pending", "OperatorFailing")
    said = "the operator fails on this job: OverflowError: Python int too large to convert to C int. "
    assert status["message"].startswith(said)
    assert "report it, with the traceback of this job in the operator's log" in status["message"]
    assert (process.degraded()["status"], process.degraded()["message"]) == ("True", status["message"])
    assert [e["type"] for e in process.events()] == ["Warning"]
    process.fault = None
    run_until_planned(process.cluster, process.operator)
    assert_one_of_everything(process.cluster)
    assert (process.degraded()["status"], process.job()["status"]["reason"]) == ("False", "AttemptStarting")


def test_a_job_that_trains_keeps_its_phase_and_each_fault_is_written_once(process: Process) -> None:
    process.cluster.answers.update({i: sidecar(i, epoch=1) for i in (0, 1)})
    run_until_planned(process.cluster, process.operator)
    assert process.operator.memory.calm(KEY), "the fault meets a glance, too"
    kube = process.cluster.kube
    for number in range(3):
        process.fault = KeyError(f"object at 0x7f{number}")
        process.look()
        if number == 0:
            writes = len(kube.log)
    assert len(kube.log) == writes, "what differs is the exception's text only"
    status = process.job()["status"]
    assert (status["phase"], status["reason"]) == ("Running", "OperatorFailing")
    assert "KeyError: 'object at 0x7f0'" in status["message"]
    process.fault = TypeError("another one")
    process.look()
    assert "TypeError: another one" in process.job()["status"]["message"]
    assert len(process.events()) == 2
    process.fault = None
    process.look()
    process.look()
    status = process.job()["status"]
    assert (status["phase"], status["reason"], process.degraded()["status"]) == (
        "Running", "RanksTraining", "False",
    )  # fmt: skip


def test_an_ended_job_keeps_its_sentence(process: Process) -> None:
    run_until_planned(process.cluster, process.operator)
    process.job()["status"] |= {"phase": "Complete", "reason": "Finished", "message": "all ranks finished"}
    process.fault = RuntimeError("")
    process.look()
    assert process.job()["status"]["message"] == "all ranks finished"
    assert process.degraded()["message"].startswith("the operator fails on this job: RuntimeError. This")


def test_a_fault_that_cannot_be_said_ends_no_worker(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.cluster.kube.denied["patch", "resumabletrainingjobs/status"] = RTJ.group
    process.fault = OverflowError("too large")
    process.look()
    assert "that it fails is not in the status: Forbidden" in caplog.text
    assert len(process.events()) == 1


def test_nobody_looks_at_a_job_while_its_fault_is_being_written(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second look would have its status overwritten by the sentence about the first."""
    queue, taken = process.runtime.queue, []
    queue.add(KEY)
    assert queue.take() == KEY
    process.fault = TypeError("a fault")
    failed = process.operator.failed

    async def slow(*given: Any) -> None:
        queue.add(KEY)
        taken.append(queue.take())
        await failed(*given)

    monkeypatch.setattr(process.operator, "failed", slow)
    process.look()
    assert taken == [None]
    assert queue.waiting == 1, "it is looked at again"

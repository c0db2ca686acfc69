"""Whatever pods say: the status stays small, fits its schema and can be read back; an event is posted once."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fake_kube import FakeKube
from operator_values import EPOCH, Situation, end_report, plan, pod, running, sidecar, spec, status_of

from rtj_operator.api import AttemptSeconds
from rtj_operator.api.base import MOST_SECONDS
from rtj_operator.decide.actions import Event
from rtj_operator.decide.ends import backoff_until
from rtj_operator.events import EventPoster, event_body
from rtj_operator.kube import EVENTS, RTJ, Object
from rtj_operator.text import count, in_bytes
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind, RankFailure
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.status import CommittedStatus, ProgressStatus

HUGE, LONG = 10**40, "\u00e9\x1b[2J\n" * 20_000
MOST_BYTES = 64 * 1024


def integers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in integers(item)]
    if isinstance(value, list):
        return [n for item in value for n in integers(item)]
    return [value] if isinstance(value, int) else []


def stored(situation: Situation) -> tuple[Situation, Object]:
    """The situation after its decision, with the status as the API server would hold it."""
    decision = situation.decide()
    body = decision.status.to_dict()
    assert len(json.dumps(body)) < MOST_BYTES
    assert all(abs(n) < 2**63 for n in integers(body)), "the API server refuses larger ones"
    assert "\\u001b" not in json.dumps(body)
    return replace(situation, status=status_of(decision)), body


def hostile_failure(epoch: int) -> Outcome:
    failure = RankFailure(rank=1, exit_code=HUGE, error=LONG)
    return Outcome(epoch=epoch, attempt=1, kind=OutcomeKind.FAILED, step=HUGE, message=LONG, failure=failure)


def test_a_life_of_hostile_answers_leaves_a_small_status_that_can_be_read_back() -> None:
    situation = running().specified(restart={"maxAttemptsWithoutProgress": 1000, "backoffSeconds": 0})
    for number in range(1, 25):
        epoch = EPOCH + number
        report = end_report(OutcomeKind.FAILED).model_copy(
            update={"outcome": hostile_failure(epoch - 1), "epoch": epoch - 1}
        )
        now = plan(f"nonce-{number}", epoch=epoch - 1)
        dead = tuple(pod(i, plan=now, status=report.model_copy(update={"pod_index": i})) for i in range(2))
        situation, _ = stored(situation.seeing(jobs=1, pods=dead).with_nonce(f"nonce-{number + 1}"))
        fresh = plan(f"nonce-{number + 1}", epoch=epoch).model_copy(update={"attempt": number + 1})
        live = tuple(pod(i, plan=fresh, status=hostile_training(i, epoch)) for i in range(2))
        situation, _ = stored(situation.seeing(jobs=1, pods=live))
        situation, _ = stored(situation.later(61))
    assert len(situation.status.attempts) == 10
    assert situation.status.counters.attempts == 25


def hostile_training(index: int, epoch: int) -> Any:
    checks = [Check(name=LONG, passed=False, detail=LONG) for _ in range(50)]
    mesh = plan().topology
    report = ResumeReport(
        epoch=epoch,
        attempt=1,
        checkpoint_id="x",
        step=HUGE,
        topology_from=mesh,
        topology_to=mesh,
        checks=checks,
    )
    commit = CommittedStatus(step=HUGE, samples=-HUGE, checkpoint_id=LONG, sequence=HUGE, time=float("nan"))
    progress = ProgressStatus(step=HUGE, epoch=-1, samples=HUGE, loss=float("inf"), time=float("nan"))
    return sidecar(
        index,
        epoch=epoch,
        reason=LONG,
        resume=report,
        last_committed=commit,
        progress=progress,
        consecutive_failures=HUGE,
        last_failure=LONG,
        store_error=LONG,
        last_save_seconds=float("nan"),
    )


def test_numbers_from_pods_are_clamped_and_not_believed() -> None:
    assert (count(-5), count(7), count(HUGE)) == (0, 7, 2**53)


@pytest.mark.parametrize("text", ["x" * 5000, "\u00e9" * 5000, "\U0001f525" * 5000, "\ud800" * 5000])
def test_a_note_fits_what_the_api_server_takes_in_bytes(text: str) -> None:
    job: Object = {"metadata": {"name": "sft", "namespace": "ns", "uid": "u"}}
    note = event_body(job, Event("Waiting", text, "k"), "me", 0.0)["note"]
    assert 0 < len(note.encode()) <= 1024
    assert in_bytes("\u00e9", 1) == ""


def test_two_operators_and_a_restart_post_an_event_once() -> None:
    async def post() -> int:
        kube = FakeKube()
        job = kube.put(RTJ, {"metadata": {"name": "sft", "namespace": "ns"}})
        event = Event("Waiting", "0/2 nodes", "waiting/1/Unschedulable")
        for _ in range(3):
            poster = EventPoster(kube, "operator")
            await poster.post(job, (event, event))
            await poster.post(job, (replace(event, message="0/3 nodes"),))
        return len([key for key in kube.objects if key[0] == EVENTS.plural])

    assert asyncio.run(post()) == 1


@pytest.mark.parametrize("lost", [-1e308, -math.inf, math.inf, math.nan])
def test_a_time_that_is_no_number_of_seconds_keeps_no_status_from_being_written(lost: float) -> None:
    report = end_report(OutcomeKind.FAILED)
    report = report.model_copy(update={"phases": report.phases.model_copy(update={"rank_lost": lost})})
    dead = tuple(pod(i, plan=True, status=report.model_copy(update={"pod_index": i})) for i in range(2))
    after, body = stored(running().seeing(jobs=1, pods=dead).with_nonce("nonce-2"))
    json.dumps(body, allow_nan=False)
    seconds = after.status.attempts[-1].seconds
    assert seconds is not None
    assert seconds.detect in (None, 1e6)


def test_no_number_that_json_has_not_stands_in_a_body() -> None:
    status = running().status
    record = status.attempts[-1].model_copy(
        update={"seconds": AttemptSeconds(detect=math.inf, restore=2.5, total=math.nan)}
    )
    body = status.model_copy(update={"attempts": [record], "save_seconds": -math.inf}).to_dict()
    assert body["attempts"][0]["seconds"] == {"restore": 2.5}
    assert "saveSeconds" not in body


def test_a_wait_of_any_length_ends_at_a_time_that_a_clock_can_show() -> None:
    """Stored before there was a cap: 2**60 seconds added to now was an exception at each look."""
    restart = spec(restart={"backoffSeconds": 2**60, "maxBackoffSeconds": 2**62}).restart
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert backoff_until(restart, 40, now) == now + timedelta(seconds=MOST_SECONDS)

"""How many attempts the journal must know (R11) does not depend on how many records the status has room for."""

from __future__ import annotations

from operator_values import EPOCH, Situation, job, pod, pods, running

from rtj_operator.api import MAX_ATTEMPTS, JobStatus


def _next_placement(situation: Situation) -> Situation:
    """All pods are lost; the next placement's pods are up once its wait is over, and an attempt is meant in them."""
    lost = situation.status.placement
    assert lost is not None
    gone = tuple(pod(i, placement=lost.number, gone=True) for i in range(2))
    situation = situation.seeing(jobs=(job(lost.number, 2),), pods=gone)
    for _ in range(4):
        situation = situation.later(600)
        situation = situation.after(situation.decide())
    number = situation.status.placement.number if situation.status.placement else 0
    assert number == lost.number + 1
    situation = situation.seeing(jobs=(job(number, 2),), pods=pods(2, placement=number)).later(600)
    situation = situation.with_nonce(f"meant-{number}")
    return situation.after(situation.decide())


def test_placements_lost_while_the_store_is_away_do_not_make_the_fenced_attempts_forgotten() -> None:
    situation = running()
    assert situation.status.known_attempts == 1
    for _ in range(MAX_ATTEMPTS + 1):
        situation = _next_placement(situation)
    assert [r.epoch for r in situation.status.attempts] == [None] * MAX_ATTEMPTS
    assert (situation.status.fenced_attempts, situation.status.known_attempts) == (1, 1)


def test_a_status_of_before_the_number_was_kept_knows_it_by_its_attempt() -> None:
    status = running().status.model_copy(update={"fenced_attempts": 0, "attempts": []})
    assert status.attempt is not None
    assert status.attempt.epoch == EPOCH
    assert status.known_attempts == 1
    assert JobStatus().known_attempts == 0

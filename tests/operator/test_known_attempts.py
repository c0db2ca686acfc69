"""How many attempts the journal must know (R11) does not depend on how many records the status has room for."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fake_cluster import Cluster, LocalStores, run_until_planned
from operator_values import EPOCH, Situation, job, pod, pods, running

from rtj_operator.api import MAX_ATTEMPTS, JobStatus
from rtj_operator.kube import JOBS, PODS
from rtj_operator.reconcile import TryLater


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


def pods_lost(cluster: Cluster) -> None:
    for key in [k for k in cluster.kube.objects if k[0] in (JOBS.plural, PODS.plural)]:
        del cluster.kube.objects[key]


def goes_on(cluster: Cluster) -> str:
    """A new operator goes on with the job as far as it can. Its last trouble."""
    operator, trouble = cluster.operator(), ""
    for _ in range(12):
        try:
            cluster.step(operator)
        except TryLater as exc:
            trouble = str(exc)
    return trouble


def test_a_number_that_was_raised_by_hand_is_told_apart_from_a_lost_journal_and_set_right_as_it_says(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path)
    run_until_planned(cluster, cluster.operator())
    cluster.status()["attempt"]["number"] += 7
    pods_lost(cluster)
    assert "kubectl patch rtj sft -n ns --subresource=status" in goes_on(cluster)
    status = cluster.status()
    assert status["reason"] == "JournalLost"
    assert "8 attempts were fenced, the journal knows 1" in status["message"]
    (change,) = re.findall(r"-p '(\{.*\})'", status["message"])
    status.update(json.loads(change)["status"])
    assert goes_on(cluster) == ""
    assert [a.attempt for a in cluster.history().attempts] == [1, 2]
    assert cluster.status()["attempt"]["number"] == 2


def test_of_a_journal_that_was_emptied_nobody_is_told_to_go_on_without_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "full")
    run_until_planned(cluster, cluster.operator())
    cluster.stores = LocalStores(tmp_path / "empty")
    pods_lost(cluster)
    said = goes_on(cluster)
    assert "does not start from scratch" in said
    assert "kubectl patch" not in said

"""What `rtj why` says would happen next, phase by phase: the rules of the spec put to what the status says."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from job_values import NOW, at, condition, job, pod

from rtj_operator.api import Phase, parse_job
from rtj_operator.conditions import Reason
from trainer_sidecar.cli import build_parser
from trainer_sidecar.kube_commands.explain import Explanation, explain
from trainer_sidecar.kube_commands.next_acts import ADVICE


def why(raw: dict[str, Any], pods: list[dict[str, Any]] | None = None, now: datetime = NOW) -> Explanation:
    return explain(parse_job(raw), pods or [], now)


def told(phase: str, reason: str, message: str = "so it is", **status: Any) -> dict[str, Any]:
    return job(phase=phase, reason=reason, message=message, **status)


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_a_sentence_about_what_comes_next(phase: Phase) -> None:
    said = why(told(phase.value, "AsExpected"))
    assert said.now[0] == f"The job is {phase.value}: so it is"
    assert said.next
    assert all(sentence[0].isupper() and sentence.endswith((".", "!")) for sentence in said.next), said.next


@pytest.mark.parametrize("reason", [r for r in Reason if r.value in ADVICE], ids=lambda r: r.value)
def test_every_advice_names_the_job(reason: Reason) -> None:
    said = why(told("Pending", reason.value))
    assert said.you_can
    assert not any("{" in sentence for sentence in said.you_can)
    for sentence in said.you_can:
        command = re.split(r"[,:] ", sentence)[0]
        if command.startswith("rtj "):
            build_parser().parse_args(shlex.split(command)[1:])  # as it is printed


def test_the_tables_speak_of_reasons_that_exist() -> None:
    assert set(ADVICE) <= {reason.value for reason in Reason}


@pytest.mark.parametrize(
    ("reason", "then"),
    [
        ("WebhookFailing", "It is tried again by itself"),
        ("ApiServerFailing", "It is tried again by itself"),
        ("OperatorFailing", "The operator tries again within a minute"),
    ],
)
def test_what_is_no_matter_of_the_job_says_that_it_is_tried_again(reason: str, then: str) -> None:
    said = why(told("Pending", reason, "what is in the way"))
    assert said.now[0] == "The job is Pending: what is in the way"
    assert said.next[0].startswith(then)
    assert said.you_can


def test_a_backoff_names_the_moment_and_the_budget_that_is_left() -> None:
    raw = told(
        "Recovering", "BackingOff", retryAt=at(12),
        counters={"attempts": 4, "failures": 3, "withoutProgress": 1},
    )  # fmt: skip
    text = " ".join(why(raw).next)
    assert f"At {NOW + timedelta(seconds=12):%H:%M:%SZ} (in 12s) attempt 5 begins, from step 400" in text
    assert "1 failure without a newer commit so far; 2 more and the job is Failed." in text


def test_a_missing_node_of_an_elastic_job_tells_when_and_how_far_it_shrinks() -> None:
    raw = told("Pending", "Unschedulable", capacitySinceNote=None, capacityShortSince=at(-20))
    raw["spec"] |= {"nodes": 4, "elastic": {"minNodes": 1, "maxNodes": 4, "scaleDownDelaySeconds": 60}}
    raw["status"]["placement"]["nodes"] = 4
    waiting = pod("sft-p1-3-x", 3, conditions=[
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    ])  # fmt: skip
    said = why(raw, [waiting])
    assert "Pod sft-p1-3-x: Unschedulable: 0/3 nodes are available" in said.now
    assert "Nodes have been missing for 20s; from" in said.next[0]
    assert "(in 40s) it goes on with the largest of 1, 2 nodes that fits" in said.next[0]
    assert any("kubectl scale rtj/sft" in advice for advice in said.you_can)


def test_a_job_that_may_not_shrink_says_that_it_waits() -> None:
    raw = told("Pending", "Unschedulable", capacityShortSince=at(-20))
    assert "without spec.elastic the job waits for all 2 of them" in why(raw).next[0]
    raw["spec"]["elastic"] = {"minNodes": 2}
    assert "no smaller size that it may use (elastic.minNodes 2)" in why(raw).next[0]


def test_a_smaller_job_tells_when_it_grows_back() -> None:
    raw = told("Running", "RanksTraining", capacitySeenSince=at(-100), resizedAt=at(-50))
    raw["spec"] |= {
        "nodes": 4,
        "elastic": {"minNodes": 1, "scaleUpDelaySeconds": 300, "cooldownSeconds": 300},
    }
    assert "It runs on 2 of 4 nodes, and there is room for more: at" in why(raw).next[-1]
    assert "(in 4m10s) it saves and grows" in why(raw).next[-1]
    del raw["status"]["capacitySeenSince"]
    assert "once room for more has been seen for 5m" in why(raw).next[-1]
    raw["spec"]["scheduling"] = {"queue": "gpus"}
    assert "in a queue it does not grow by itself" in why(raw).next[-1]


@pytest.mark.parametrize(
    ("reason", "text"),
    [("Resized", "spec.nodes asks for"), ("Growing", "larger placement"), ("SpecChanged", "the new spec")],
)
def test_a_save_that_was_ordered_tells_what_it_is_for(reason: str, text: str) -> None:
    raw = told("Saving", "Saving")
    raw["status"]["attempt"] |= {"order": "SaveAndExit", "orderReason": reason, "orderedAt": at(-1)}
    assert text in why(raw).next[0]
    raw["spec"]["suspend"] = True
    assert "Suspended and holds nothing" in why(raw).next[0]


def test_a_spec_that_no_operator_has_read_says_so_first() -> None:
    raw = told("Running", "RanksTraining")
    raw["metadata"]["generation"] = 5
    assert "generation 5" in why(raw).next[0]
    raw["status"] = {}
    said = why(raw)
    assert said.now == ["No operator has written a status for this job yet."]
    assert "watches this namespace" in said.next[0]


def test_what_is_safe_is_told_with_its_proof() -> None:
    raw = told("Running", "RanksTraining")
    assert "The newest proven one is step 300" in " ".join(why(raw).safe)
    raw["status"]["lastVerified"] = raw["status"]["lastCommitted"]
    assert "It has been proven by a resume, a drill or a deep check." in why(raw).safe
    del raw["status"]["lastCommitted"]
    assert why(raw).safe == ["Nothing is committed yet: a failure now means training from the start."]
    assert "from scratch: nothing has been committed." in " ".join(why(raw).next)


@pytest.mark.parametrize(
    ("phase", "reason", "adopt", "text"),
    [
        (
            "Pending",
            "PodsPending",
            True,
            "from the newest commit of the run that checkpoint.adopt takes over",
        ),
        ("Failed", "RunExists", False, "with checkpoint.adopt from the newest commit of that run"),
    ],
)
def test_of_a_run_that_an_earlier_object_began_nobody_is_told_that_nothing_is_committed(
    phase: str, reason: str, adopt: bool, text: str
) -> None:
    raw = told(phase, reason)
    raw["spec"]["checkpoint"]["adopt"] = adopt
    del raw["status"]["lastCommitted"]
    said = why(raw)
    assert text in " ".join(said.next)
    assert said.safe == [
        "What was committed before this object stays: rtj checkpoints list --job sft shows it."
    ]


def test_a_job_whose_end_nobody_saw_says_that_its_last_step_is_safe() -> None:
    raw = told("Complete", "Finished")
    raw["status"]["attempts"][-1] |= {"lastStep": 600, "outcome": "Finished", "endedAt": at(-1)}
    assert "So is step 600, the last one: rtj checkpoints list --job sft shows it." in why(raw).safe
    raw["status"]["attempts"][-1]["lastStep"] = raw["status"]["lastCommitted"]["step"]
    assert not any("the last one" in sentence for sentence in why(raw).safe)


def test_conditions_that_are_not_as_they_should_be_are_pointed_at() -> None:
    raw = told("Running", "RanksTraining")
    raw["status"]["conditions"] += [
        condition("ResumeVerified", "False", "ResumeDiffers", "loss 2.1, expected 1.9")
    ]
    assert why(raw).look_at == ["ResumeVerified is False (ResumeDiffers): loss 2.1, expected 1.9"]


def test_ends_say_what_would_start_the_job_again() -> None:
    assert (
        "any change of it starts the job again, from step 400"
        in why(told("Failed", "TooManyFailures")).next[0]
    )
    suspended = told("Suspended", "Suspended")
    suspended["spec"]["suspend"] = True
    assert why(suspended).you_can == ["rtj resume sft"]
    done = told("Complete", "Finished", endedAt=at(-10))
    done["spec"]["ttlSecondsAfterFinished"] = 3600
    assert "the object is deleted; its checkpoints stay" in why(done).next[0]


def test_a_clock_in_another_zone_changes_nothing() -> None:
    raw = told("Recovering", "BackingOff", retryAt=at(30))
    assert "in 30s" in why(raw, now=NOW.astimezone(UTC)).next[0]


def test_how_often_it_saves_and_how_often_wastes_least_is_told_and_both_distances() -> None:
    said = why(job())
    assert "The ranks save every 100 steps or 600 s, whichever comes first." in said.next
    assert any("every 4m wastes least" in sentence for sentence in said.next)
    assert "If everything stopped now, 50 steps (400 samples, 1m35s) would be run again." in said.safe
    assert "If only the proven one can be restored then, 150 steps (1200 samples, 33m15s)." in said.safe
    auto = job()
    auto["spec"]["checkpoint"]["intervalPolicy"] = "Auto"
    auto["status"]["checkpointInterval"] |= {"policy": "Auto", "seconds": 240}
    assert "The ranks save every 4m, which the operator has chosen (intervalPolicy Auto)." in why(auto).next

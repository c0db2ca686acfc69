"""What ails a job that goes on is shown as Degraded, with its cause, and gone with it."""

from dataclasses import replace

import pytest
from operator_values import Situation, pod, pods, running, sidecar

from rtj_operator.conditions import ConditionType, Reason, find
from trainer_sidecar.contract.status import InFlightStatus


def test_saves_that_fail_in_a_row_are_shown_with_why_also_when_the_store_is_fine() -> None:
    ill = pods(
        2, plan=True, status=sidecar(0, consecutive_failures=3, last_failure="rank 0: 64 bytes are free")
    )
    decision = running().seeing(jobs=1, pods=ill).decide()
    for kind, status in ((ConditionType.DEGRADED, "True"), (ConditionType.CHECKPOINT_COMMITTED, "False")):
        shown = find(decision.status.conditions, kind)
        assert shown is not None
        assert (shown.status, shown.reason) == (status, Reason.SAVES_FAILING)
        assert shown.message == "3 saves in a row did not commit: rank 0: 64 bytes are free"


def degraded(situation: Situation) -> tuple[str, str, str]:
    shown = find(situation.decide().status.conditions, ConditionType.DEGRADED)
    assert shown is not None
    return shown.status, shown.reason, shown.message


def test_a_save_that_the_store_keeps_from_ending_is_shown_after_a_minute_and_gone_with_its_cause() -> None:
    def seeing(seconds: float, phase: str = "Stalled") -> Situation:
        save = InFlightStatus(
            save_id="ab", checkpoint_id="c", step=40, phase=phase, sealed=2, uploaded=0, of=2, seconds=seconds
        )
        ill = sidecar(0, in_flight=save, store_error="StoreUnavailable: no route")
        return running().seeing(jobs=1, pods=pods(2, plan=True, status=ill))

    assert degraded(seeing(59.0))[0] == "False"
    assert degraded(seeing(3600.0, "Uploading"))[0] == "False"
    text = "the save of step 40 does not commit: StoreUnavailable: no route"
    assert degraded(seeing(60.0)) == ("True", "SavesFailing", text)
    suspending = seeing(60.0).specified(suspend=True)
    assert degraded(suspending.after(suspending.decide()).later(20)) == ("True", "SavesFailing", text)


@pytest.mark.parametrize("index", [0, 1])
def test_a_sidecar_that_ends_again_and_again_is_shown_while_ranks_train(index: int) -> None:
    live = [pod(i, plan=True, status=sidecar(i)) for i in range(2)]
    live[index] = replace(
        live[index],
        status=None,
        sidecar_running=False,
        waiting_reason="CrashLoopBackOff",
        waiting_message="back-off 10s restarting failed container=rtj-sidecar",
    )
    status, reason, message = degraded(running().seeing(jobs=1, pods=tuple(live)))
    assert (status, reason) == ("True", "SidecarFailing")
    assert f"sft-p1-{index}" in message
    assert "container=rtj-sidecar" in message

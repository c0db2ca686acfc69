"""A campaign of fault drills that is broken off reports what it has."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_sidecar.faultdrills.campaign import run
from trainer_sidecar.faultdrills.catalogue import Drill
from trainer_sidecar.faultdrills.outcome import Check, Loss, Seen, Verdict
from trainer_sidecar.faultdrills.stage import NoOperatorError, Stage
from trainer_sidecar.kube_commands.drill import sigterm_interrupts
from trainer_sidecar.store.memory import MemoryStore

GOOD = Seen(
    fired="SIGKILL to rank 0",
    checks=[Check(name="each sample exactly once", holds=True, seen="80 samples")],
    lost=Loss(steps=4, samples=32, seconds=2.5),
    recovery_seconds=12.0,
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyboardInterrupt(), "the campaign was broken off in D2: interrupted"),
        (
            NoOperatorError("no operator serves it"),
            "the campaign was broken off in D2: no operator serves it",
        ),
        (KeyError("uid"), "the drill itself broke off: KeyError: 'uid'"),
    ],
)
def test_a_campaign_that_is_broken_off_reports_what_it_has(error: BaseException, reason: str) -> None:
    def breaks(stage: Stage) -> Seen:
        raise error

    acts: list[Any] = [lambda stage: GOOD, breaks, lambda stage: GOOD]
    drills = [Drill(f"D{n}", f"d{n}", "Some", "nothing", "nothing", act) for n, act in enumerate(acts, 1)]
    store, said = MemoryStore("memory://x"), list[str]()
    place: Any = SimpleNamespace(name="scratch", cluster=SimpleNamespace(host="https://10.0.0.1"))
    done = run(drills, place, store, rpo_seconds=None, rto_seconds=None, say=said.append)
    bug = isinstance(error, KeyError)
    assert [d.verdict for d in done.drills] == [
        Verdict.PASSED,
        Verdict.FAILED if bug else Verdict.NOT_RUN,
        Verdict.PASSED if bug else Verdict.NOT_RUN,
    ]
    assert done.drills[1].reasons == [reason]
    assert not done.passed
    assert len(said) == 3
    if isinstance(error, NoOperatorError):
        with pytest.raises(NoOperatorError):  # nothing is known yet: an error and no report
            run(drills[1:], place, store, rpo_seconds=None, rto_seconds=None, say=said.append)


def test_a_campaign_that_gets_a_sigterm_reports_what_it_has() -> None:
    def waits(stage: Stage) -> Seen:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        raise AssertionError("nothing interrupted the drill")

    drills = [
        Drill("D1", "d1", "Some", "nothing", "nothing", lambda stage: GOOD),
        Drill("D2", "d2", "Some", "nothing", "nothing", waits),
    ]
    place: Any = SimpleNamespace(name="scratch", cluster=SimpleNamespace(host="https://10.0.0.1"))
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_interrupts():
        done = run(
            drills, place, MemoryStore("memory://x"), rpo_seconds=None, rto_seconds=None, say=lambda _: None
        )
    assert [d.verdict for d in done.drills] == [Verdict.PASSED, Verdict.NOT_RUN]
    assert done.drills[1].reasons == ["the campaign was broken off in D2: interrupted"]
    assert signal.getsignal(signal.SIGTERM) is before

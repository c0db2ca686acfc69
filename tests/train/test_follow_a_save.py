"""Rank 0 asks its sidecar what became of a save, and does not ask for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.train import saves, sealing
from trainer_sidecar.train.errors import SidecarRefused
from trainer_sidecar.train.saves import Code, InFlight, Saves
from trainer_sidecar.train.sealing import tell_sealed

IN_FLIGHT, UNKNOWN, COMMITTED = SaveOutcome.IN_FLIGHT, SaveOutcome.UNKNOWN, SaveOutcome.COMMITTED


class Sidecar:
    """Answers in turn, the last answer for ever; after `patience` seconds of it a test has failed."""

    def __init__(self, *answers: SaveOutcome, patience: float = 5.0) -> None:
        self.answers, self.given_up = list(answers), list[m.GiveUp]()
        self._until = time.monotonic() + patience

    def ask(self, request: m.AskSave, expected: type[m.SaveReply]) -> m.SaveReply:
        assert time.monotonic() < self._until, "it asks for ever"
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return expected(save_id=request.save_id, outcome=answer)

    def tell(self, request: m.GiveUp) -> None:
        self.given_up.append(request)


def follow(sidecar: Sidecar, timeout: float, held: Callable[[], bool] = lambda: False) -> InFlight:
    policy = SimpleNamespace(save_timeout_seconds=timeout)
    of: Any = Saves.__new__(Saves)
    of._stager = SimpleNamespace(held=held)
    of._env = SimpleNamespace(rank=0, client=sidecar, plan=SimpleNamespace(checkpoint=policy))
    save = InFlight("a" * 64, "000000000003-0000000001-aaaaaaaa", 3)
    of._follow(save)
    return save


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "_LOOK_SECONDS", (0.005, 0.01))


def test_a_save_that_the_sidecar_does_not_know_for_its_time_out_has_failed_and_is_given_up() -> None:
    sidecar = Sidecar(IN_FLIGHT, UNKNOWN)
    save = follow(sidecar, 0.2)
    assert save.code is Code.FAILED
    assert save.detail == "the sidecar has not known this save for 0.2 s, its time-out"
    assert [(g.save_id, g.rank) for g in sidecar.given_up] == [("a" * 64, 0)]


def test_a_save_in_flight_is_waited_for_beyond_its_time_out() -> None:
    sidecar = Sidecar(*[UNKNOWN, IN_FLIGHT] * 30, COMMITTED)
    assert follow(sidecar, 0.1).code is Code.COMMITTED
    assert sidecar.given_up == []


def test_the_sidecar_is_not_asked_while_it_holds_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question costs both sides as much as a hundred looks at the buffer, and there would be dozens per save."""
    monkeypatch.setattr(saves, "_ASK_SECONDS", 60.0)
    looks = iter([True] * 50)
    sidecar = Sidecar(IN_FLIGHT, COMMITTED, patience=60)
    assert follow(sidecar, 60, lambda: next(looks, False)).code is Code.COMMITTED
    assert next(looks, None) is None, "it asked before the buffer was free"


class Busy(Sidecar):
    """Refuses a seal as long as it says that the save before is in flight."""

    def tell(self, request: Any) -> None:
        if self.answers[0] is IN_FLIGHT:
            raise SidecarRefused("BadRequest", "comes while save aaaaaaaa (step 3) is in flight")
        self.sealed = request


class LetsGoLate(Busy):
    """Says that the save has failed before it takes another one."""

    refusals = 3

    def tell(self, request: Any) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise SidecarRefused("BadRequest", "comes while save aaaaaaaa (step 3) is in flight")
        self.sealed = request


def test_a_seal_is_told_until_the_sidecar_takes_it_or_provably_will_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = m.Sealed(save_id="b" * 64, rank=0)
    late: Any = LetsGoLate(SaveOutcome.FAILED)
    tell_sealed(late, message, "a" * 64, time.monotonic() + 5)
    assert late.sealed == message
    monkeypatch.setattr(sealing, "_LETS_GO_SECONDS", 0.05)
    never: Any = LetsGoLate(SaveOutcome.FAILED)
    never.refusals = 10**6
    begun = time.monotonic()
    with pytest.raises(SidecarRefused, match="is in flight"):
        tell_sealed(never, message, "a" * 64, begun + 600)
    assert time.monotonic() - begun < 60


def test_a_seal_waits_for_a_failed_save_that_the_sidecar_has_not_let_go_of() -> None:
    message = m.Sealed(save_id="b" * 64, rank=0)
    busy: Any = Busy(IN_FLIGHT, IN_FLIGHT, SaveOutcome.FAILED)
    tell_sealed(busy, message, "a" * 64, time.monotonic() + 5)
    assert busy.sealed == message
    for failed, seconds in (("", 5.0), ("a" * 64, 0.05)):
        busy = Busy(IN_FLIGHT)
        with pytest.raises(SidecarRefused, match="is in flight"):
            tell_sealed(busy, message, failed, time.monotonic() + seconds)

"""A rank says to its sidecar when training waits for a save: then no limit on uploads holds it up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.train import saves as module
from trainer_sidecar.train.saves import Code, InFlight, Saves


def following(asked: list[m.AskSave], monkeypatch: pytest.MonkeyPatch) -> tuple[Saves, InFlight]:
    """A rank that follows a save, which commits once somebody has said that it is awaited."""
    monkeypatch.setattr(module, "_ASK_SECONDS", 0.02)

    def ask(message: m.AskSave, _: object) -> m.SaveReply:
        asked.append(message)
        outcome = SaveOutcome.COMMITTED if message.awaited else SaveOutcome.IN_FLIGHT
        return m.SaveReply(save_id=message.save_id, outcome=outcome)

    saves: Any = object.__new__(Saves)
    saves._env = SimpleNamespace(
        client=SimpleNamespace(ask=ask),
        plan=SimpleNamespace(checkpoint=SimpleNamespace(save_timeout_seconds=60.0)),
    )
    saves._stager = SimpleNamespace(held=lambda: True)
    saves._agreement = SimpleNamespace(decide=lambda outcome: outcome)
    save = InFlight("id", "checkpoint", 3)
    saves.in_flight = save
    return saves, save


def test_who_waits_says_so_and_who_does_not_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[m.AskSave] = []
    saves, save = following(asked, monkeypatch)
    monkeypatch.setattr(Saves, "settle", lambda _, code: code)
    monkeypatch.setattr(Saves, "outcome", property(lambda _: save.code))

    def follow() -> None:
        saves._follow(save)
        save.over.set()

    save.over = threading.Event()
    thread = threading.Thread(target=follow)
    thread.start()
    deadline = threading.Event()
    while len(asked) < 3:
        assert not deadline.wait(0.01)
    assert not any(message.awaited for message in asked)
    assert saves.wait() == Code.COMMITTED  # type: ignore[comparison-overlap]
    thread.join(20)
    assert asked[-1].awaited

"""kopf as a watch source: endless backoffs, its settings, and a supervisor that starts it again after any error."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import kopf
import pytest

from rtj_operator import watches
from rtj_operator.main import parse, pod_settings
from rtj_operator.watches import EndlessBackoffs, Supervisor, WatchOptions


def test_backoffs_never_end_and_are_capped() -> None:
    first = list(itertools.islice(EndlessBackoffs(), 1000))
    assert first[:8] == [1, 1, 2, 3, 5, 8, 13, 21]
    assert set(first[7:]) == {21}
    assert not hasattr(EndlessBackoffs(), "__len__"), "kopf gives up after the last of a sized collection"


def test_kopf_keeps_its_hands_off_the_objects() -> None:
    settings = watches._settings("job")
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    assert settings.process.ultimate_exiting_timeout is None
    storage = settings.persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "sft"}, "spec": {"nodes": 4}})
    assert (storage.fetch(body=body), dict(storage.build(body=body))) == (None, {}), (
        "no body is copied to be compared"
    )
    assert 0 < (settings.watching.chunk_size or 0) <= 250
    assert settings.queueing.idle_timeout < 1, (
        "a start among thousands of pods holds all of their bodies for so long"
    )
    supervisor = Supervisor(WatchOptions(lambda **_: None, "job"), lambda *_: None, lambda *_: None)
    registry = supervisor._registry()
    assert len(registry._watching.get_all_handlers()) == 4
    assert not registry._changing.get_all_handlers()
    assert not registry._spawning.get_all_handlers(), "timers and daemons would force a finalizer"


def test_the_supervisor_starts_the_watches_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, twice = [], threading.Event()

    async def operator(**kwargs: Any) -> None:
        runs.append(kwargs["stop_flag"])
        if len(runs) == 1:
            raise RuntimeError("etcdserver: request timed out")
        twice.set()
        while not kwargs["stop_flag"].wait(0.01):
            pass

    monkeypatch.setattr(kopf, "operator", operator)
    monkeypatch.setattr(EndlessBackoffs, "__iter__", lambda self: itertools.repeat(0.01))
    restarts: list[int] = []
    supervisor = Supervisor(
        WatchOptions(lambda **_: None, "job", ("ns",)),
        lambda *_: None,
        lambda *_: None,
        on_restart=lambda: restarts.append(1),
    )
    supervisor.start()
    assert twice.wait(10)
    supervisor.stop()
    assert "kopf" not in {thread.name for thread in threading.enumerate()}
    assert len(runs) == 2
    assert restarts == [1]


def test_every_flag_has_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTJ_OPERATOR_SIDECAR_IMAGE", "registry/sidecar:1")
    monkeypatch.setenv("RTJ_OPERATOR_SIDECAR_COMMAND", "python3 -m trainer_sidecar.sidecar")
    settings = pod_settings(parse([]))
    assert settings.sidecar_image == "registry/sidecar:1"
    assert settings.sidecar_command == ("python3", "-m", "trainer_sidecar.sidecar")
    assert parse(["--namespaces", "a,b"]).namespaces == "a,b"

"""What `rtj run` tells of its sidecar's status: what is at stake, and no sentence that is wrong by then."""

from __future__ import annotations

import http.server
import io
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint, SaveReason
from trainer_sidecar.contract.keys import RunKeys, checkpoint_id
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.status import (
    CommittedStatus,
    InFlightStatus,
    ProgressStatus,
    SidecarStatus,
    TrainerState,
)
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.run import finished
from trainer_sidecar.run.finished import command_digest, record_finish, why_complete
from trainer_sidecar.run.not_finite import why_no_good
from trainer_sidecar.run.run_events import RunEvents
from trainer_sidecar.run.status_watch import StatusWatch, _of_losses
from trainer_sidecar.store.history import History
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.quarantine import quarantine

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import store_world as world

FULL = "NoSpace: file:///ckpt: the disk is full"


def told(reason: SaveReason, *, step: int = 20, still: float = 0.0, step_seconds: float | None = None) -> str:
    """All lines about a save of that reason that meets a full store, after a commit of step 5; seen twice.

    `still`: seconds since the last step, which took `step_seconds`.
    """
    out = io.StringIO()
    watch = StatusWatch(1, RunEvents(out=out))
    watch.new_attempt(1)
    name = checkpoint_id(5, 1, "0123abcd")
    done = CommittedStatus(step=5, samples=5, checkpoint_id=name, sequence=1, time=0)
    facts: dict[str, Any] = {"sealed": 1, "uploaded": 0, "of": 1, "seconds": 3.0, "reason": reason}
    save = InFlightStatus(save_id="s", checkpoint_id=name, step=step, phase="Stalled", **facts)
    status = SidecarStatus(
        contract_version=CONTRACT_VERSION,
        pod_index=0,
        ready=True,
        reason="",
        epoch=1,
        attempt=1,
        trainer=TrainerState.RUNNING,
        in_flight=save,
        last_committed=done,
        store_error=FULL,
        progress=ProgressStatus(step=step, epoch=0, samples=0, step_seconds=step_seconds, time=0.0),
    )
    watch._moved = (step, time.monotonic() - still)
    for _ in range(2):
        watch._tell(status)
    return out.getvalue()


@pytest.mark.parametrize("reason", [SaveReason.FINAL, SaveReason.ORDER])
def test_at_the_last_save_a_full_store_is_told_with_what_is_lost_and_what_to_do(reason: SaveReason) -> None:
    text = told(reason)
    assert "training goes on" not in text
    assert text.count("wait for their save of step 20") == 1
    assert "what was trained after step 5 is lost" in text
    assert FULL in text
    assert "make the store take it" in text


def test_beside_a_save_that_was_due_training_goes_on() -> None:
    text = told(SaveReason.INTERVAL)
    assert text.count("training goes on") == 1
    assert "is lost" not in text


def test_a_long_step_is_no_standstill() -> None:
    assert "have stopped training" not in told(SaveReason.INTERVAL, still=60.0, step_seconds=30.0)
    assert "have stopped training" not in told(SaveReason.INTERVAL, still=60.0), "the first one may compile"
    assert "have stopped training" in told(SaveReason.INTERVAL, still=60.0, step_seconds=1.0)
    assert "have stopped training" in told(SaveReason.INTERVAL, still=600.0, step_seconds=30.0)


def test_a_verified_resume_says_when_no_loss_was_compared() -> None:
    batch = Batch(global_batch_size=8, micro_batch_size=8, accumulation=1)
    place = Topology(nodes=1, ranks_per_node=1, mesh=Mesh(dp=1), batch=batch)
    half = batch.model_copy(update={"global_batch_size": 4, "micro_batch_size": 4})
    report = ResumeReport(
        epoch=1,
        attempt=2,
        checkpoint_id=checkpoint_id(5, 1, "0123abcd"),
        step=5,
        topology_from=place,
        topology_to=place,
        checks=[Check(name="step", passed=True, expected=5, found=5)],
        verified=True,
    )
    assert _of_losses(report) == ", no loss to compare: no steps after it had been seen before"
    assert _of_losses(
        report.model_copy(update={"topology_to": place.model_copy(update={"batch": half})})
    ) == (", no loss to compare: the global batch was 8, is 4")
    assert _of_losses(report.model_copy(update={"loss_delta": 0.0})) == ", loss delta 0"
    assert _of_losses(report.model_copy(update={"verified": None})) == ""
    failed = Check(name="cursor", passed=False, expected=40, found=48)
    told = str(report.model_copy(update={"checks": [*report.checks, failed], "verified": False}))
    assert told.splitlines()[1:] == ["ok     step: 5", "FAILED cursor: expected 40, found 48"]


def test_only_the_same_command_with_the_same_files_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, train, parts = (tmp_path / name for name in ("config.yaml", "train.py", "parts.py"))
    config.write_text("steps: 8")
    train.write_text("import os, parts; lr = os.environ.get('RATE')")
    parts.write_text("layers = 4")
    script = [str(train), f"--config={config}"]
    point = RestorePoint(
        checkpoint_id=checkpoint_id(8, 1, "0123abcd"),
        sequence=2,
        step=8,
        manifest=ObjectRef(size=1, sha256="00"),
    )

    class At(History):
        newest_restorable = point  # type: ignore[assignment]

    class Elsewhere(History):
        newest_restorable = point.model_copy(update={"sequence": 3})  # type: ignore[assignment]

    store, keys, command = MemoryStore(), RunKeys("local", "one"), command_digest(script)
    assert not why_complete(store, keys, At(), command), "nobody has recorded an end"
    record_finish(store, keys, point, command)
    assert "finished at step 8" in why_complete(store, keys, At(), command_digest(script))
    assert not why_complete(store, keys, Elsewhere(), command), (
        "there is a newer checkpoint, or this one is bad"
    )
    assert not why_complete(store, keys, History(), command)
    assert not why_complete(store, keys, At(), command_digest([*script, "--steps=9"]))
    monkeypatch.setenv("UNMENTIONED", "1")
    assert command_digest(script) == command
    monkeypatch.setenv("RATE", "0.1")
    assert command_digest(script) != command, "the script asks for this variable"
    monkeypatch.delenv("RATE")
    parts.write_text("layers = 5")
    assert command_digest(script) != command, "the script imports this module"
    parts.write_text("layers = 4")
    config.write_text("steps: 9")
    assert not why_complete(store, keys, At(), command_digest(script))
    store.put(keys.finished, b"garbage")
    assert not why_complete(store, keys, At(), command)


def test_a_command_that_cannot_be_told_apart_is_never_complete_and_arguments_may_be_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_digest([str(tmp_path / "none.py"), "x" * 300, "--note=" + "y" * 5000, "/no/such\0file"])
    assert not command_digest(["-m", "pkg.train"]), "its files may lie anywhere"
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(finished, "_MOST_FILES", 0)
    assert not command_digest([str(tmp_path / "train.py")])
    store, keys = MemoryStore(), RunKeys("local", "one")
    point = RestorePoint(checkpoint_id="x", sequence=2, step=8, manifest=ObjectRef(size=1, sha256="00"))
    record_finish(store, keys, point, "")
    assert not list(store.list(keys.prefix))


def test_a_checkpoint_whose_loss_was_no_number_is_told_with_the_way_back() -> None:
    store = MemoryStore()
    fenced = world.fence(store)
    commits = [world.save(store, fenced, step) for step in (4, 8, 12)]
    for lost in commits[1:]:
        store.put(world.KEYS.journal(lost.seq), lost.model_copy(update={"finite": False}).to_bytes())
    history = world.journal(store).read()
    ids = [m.checkpoint_id for m in commits]
    assert not why_no_good(history, ids[0])
    text = why_no_good(history, ids[2])
    assert "no finite number at step 12" in text
    assert f"step 4 ({ids[0]})" in text
    assert f"rtj checkpoints quarantine {ids[1]} --descendants" in text, (
        "the first one of them covers the rest"
    )
    about: Any = {"owner": fenced.entry.owner, "writer": "ada", "covers_descendants": True}
    quarantine(world.journal(store), ids[1], "state", "loss not finite", **about)
    point = world.journal(store).read().newest_restorable
    assert point is not None
    assert point.checkpoint_id == ids[0], "and that is where it goes on"


def test_the_sidecar_is_asked_directly_whatever_proxy_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    name = checkpoint_id(8, 2, "0123abcd")
    status = SidecarStatus(
        contract_version=CONTRACT_VERSION,
        pod_index=0,
        ready=True,
        reason="",
        epoch=1,
        attempt=1,
        trainer=TrainerState.RUNNING,
        last_committed=CommittedStatus(step=8, samples=8, checkpoint_id=name, sequence=2, time=0),
        progress=ProgressStatus(epoch=1, step=8, samples=8, time=0),
    )
    answers = [(503, b"{}"), (200, b"no status"), (200, status.to_bytes())]
    asked: list[str] = []

    class Sidecar(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answers[len(asked)]
            asked.append(self.path)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    out = io.StringIO()
    with http.server.HTTPServer(("127.0.0.1", 0), Sidecar) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        watch = StatusWatch(server.server_port, RunEvents(out=out))
        watch.new_attempt(1)
        for count in (1, 2):
            watch.poll_now()
            assert (watch.status, asked) == (None, ["/status"] * count)
        watch.poll_now()
        server.shutdown()
    watch.poll_now()  # nobody answers: no news
    assert asked == ["/status"] * 3
    assert watch.status == status
    assert f"step 8 committed (checkpoint {name})" in out.getvalue()
    assert watch.seconds_without_step(1) > 0

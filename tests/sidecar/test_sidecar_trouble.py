"""Stores that fail, messages that lie, plans that are garbage: visible, harmless, and over when their cause is."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from sidecar_world import FakeRank, Save, World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.status import PeerReport, SaveOutcome, TrainerState
from trainer_sidecar.contract.volume import MAX_MESSAGE_BYTES, Volume
from trainer_sidecar.sidecar.config import Config
from trainer_sidecar.sidecar.http_server import HttpServer, Pages
from trainer_sidecar.sidecar.main import EXIT_USAGE, main
from trainer_sidecar.sidecar.sidecar import Sidecar
from trainer_sidecar.store.base import AccessDeniedError
from trainer_sidecar.store.faulty import Fault, FaultyStore

MakeWorld = Callable[..., World]


def in_process(world: World, *faults: Fault) -> tuple[Sidecar, FaultyStore]:
    """A sidecar in this process, over a store with faults."""
    pod, store = world.pods[0], FaultyStore(world.store, *faults)
    config = Config(
        volume=Volume(pod.volume.root),
        plan_file=pod.plan_file,
        pod_index=0,
        pod_name="pod-0",
        status_host="127.0.0.1",
        status_port=pod.port,
        keys=RunKeys("team", "job"),
        store_url=store.url,
        store_endpoint=None,
        store_region=None,
        threads=2,
    )
    sidecar = Sidecar(config, lambda: store)
    world.embedded.append(sidecar)
    sidecar.start()
    return sidecar, store


@pytest.mark.parametrize(
    ("op", "pattern"),
    [("create_large", "*.distcp"), ("get", "*/journal/*"), ("create", "*/journal/*"), ("head", "*/parts/*")],
)
def test_a_save_stalls_while_the_store_fails_and_commits_when_it_is_back(
    make_world: MakeWorld, op: str, pattern: str
) -> None:
    world = make_world(1, 2)
    fault = Fault(op, pattern, times=0, error=lambda key: AccessDeniedError(f"expired for {key}", key=key))
    sidecar, _ = in_process(world, fault)
    world.begin()
    world.connect()
    fault.times = 1_000_000
    save = world.save(10)
    status = eventually(
        lambda: (s := world.pods[0].status()).in_flight is not None and s.in_flight.phase == "Stalled" and s,
        "Stalled",
    )
    assert "AccessDenied" in status.store_error
    assert world.ranks[0].outcome(save).outcome is SaveOutcome.IN_FLIGHT
    assert world.pods[0].metric("checkpoint_inprogress_count") == 1
    assert world.history().manifests == {}
    fault.times = 0
    world.wait(save)
    assert fault.fired > 0
    eventually(lambda: world.pods[0].status().store_error == "", "no store error any more")
    assert sidecar.saves.consecutive_failures == 0


def test_unclear_answers_of_the_store_still_commit_once(make_world: MakeWorld) -> None:
    world = make_world(1, 2)
    faults = [
        Fault(op, pattern, lose=lose, skip=skip)
        for op, pattern in (("create_large", "*"), ("create", "*/journal/*"))
        for lose, skip in (("request", 0), ("reply", 1))
    ]
    in_process(world, *faults)
    world.begin()
    world.connect()
    save = world.save(10)
    world.wait(save)
    assert [e.kind for e in world.history().entries] == ["Attempt", "Manifest"]
    assert faults[0].fired == faults[1].fired == faults[2].fired == 1


def test_nothing_is_committed_to_a_store_that_overwrites(make_world: MakeWorld) -> None:
    world = make_world(1, 1)
    sidecar, store = in_process(world)
    inner, honest = store.inner, store.inner.create

    def careless(key: str, data: bytes) -> None:
        inner.put(key, data)

    world.begin()
    world.connect()
    inner.create = careless  # type: ignore[method-assign]
    save = world.save(10)
    status = eventually(lambda: (s := world.pods[0].status()).store_error and s, "a refusal")
    assert "UnsupportedStore" in status.store_error
    assert "ignores If-None-Match" in status.store_error
    assert world.history().manifests == {}
    inner.create = honest  # type: ignore[method-assign]
    world.wait(save)
    assert sidecar.saves.consecutive_failures == 0
    assert not [o.key for o in world.store.list("") if "probe" in o.key]


def test_hostile_messages_are_answered_or_cut_and_end_nothing(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    plan = world.begin()
    zero, one = world.connect()
    for change, word in (
        ({"epoch": plan.epoch - 1}, "WrongEpoch"),
        ({"contract_version": 99}, "WrongContract"),
        ({"rank": 7}, "BadRequest"),
        ({"world_size": 3}, "BadRequest"),
    ):
        stranger = FakeRank(world.pods[0], 0, plan)
        failure = stranger.hello(**change)
        assert isinstance(failure, m.Failure)
        assert failure.error == word
        stranger.close()
    silent = FakeRank(world.pods[0], 0, plan)
    for raw in (
        b"",
        b"{",
        b"[]",
        b'{"op":"Nothing"}',
        b"\xff" * 100,
        b'{"op":"AskSave","saveId":"x"}',
        b"[" * 100_000,
    ):
        failure = silent.ask_raw(raw)
        assert isinstance(failure, m.Failure)
        assert failure.error == "BadRequest"
    silent.socket.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
    failure = silent.receive()
    assert isinstance(failure, m.Failure)
    assert "limit" in failure.message
    with pytest.raises(EOFError):
        silent.receive()
    half = FakeRank(world.pods[0], 0, plan)
    half.socket.sendall(struct.pack("<I", 1000) + b"{")
    half.close()
    for message, word in (
        (m.Sealed(save_id="ff" * 32, rank=0), "BadRequest"),
        (m.Sealed(save_id="ff" * 32, rank=1), "BadRequest"),
        (m.GiveUp(save_id="ff" * 32, rank=1, reason="x"), "BadRequest"),
        (m.AddWitness(checkpoint_id="../../etc", steps=[]), "BadRequest"),
        (m.AddWitness(checkpoint_id="000000000001-0000000099-00000000", steps=[]), "BadRequest"),
        (m.OpenRestore(checkpoint_id="../.."), "BadRequest"),
        (m.Fetch(file=0, ranges=[(0, 1)]), "BadRequest"),
        (m.AskSlices(tensors=[-1]), "BadRequest"),
    ):
        failure = zero.ask(message)
        assert isinstance(failure, m.Failure), message
        assert failure.error == word
    status = world.pods[0].status()
    assert [r.alive for r in status.ranks] == [True, True]
    assert status.ready
    save = world.save(3)
    world.wait(save)
    assert one.outcome(save).outcome is SaveOutcome.COMMITTED


def test_links_in_the_stage_folder_are_not_followed(make_world: MakeWorld) -> None:
    world = make_world(1, 1).start()
    world.begin()
    (rank,) = world.connect()
    secret = world.root / "secret"
    secret.write_bytes(b"credentials" * 100_000)
    save = Save(world, 3)
    rank.stage(save)
    (rank.folder / "buffer-0").unlink()
    (rank.folder / "buffer-0").symlink_to(secret)
    rank.ask(m.Sealed(save_id=save.id, rank=0))
    world.wait(save, SaveOutcome.FAILED)
    assert save.checkpoint in world.history().aborted
    assert not (world.store_root / world.keys.shard(save.checkpoint, 0)).exists()


def test_hostile_reports_are_refused_and_never_believed(make_world: MakeWorld) -> None:
    world = make_world(2, 1)
    pod = world.pods[0].start()
    plan = world.begin()
    rank = FakeRank(pod, 0, plan)
    rank.hello()
    world.ranks = [rank]
    save = world.save(3)
    for body, code in ((b"{", 400), (b"[]", 400), (b'{"podIndex":1}', 400), (b"\xff", 400)):
        assert pod.report(body, plan.nonce)[0] == code
    assert pod.request("/elsewhere", b"{}")[0] == 404
    with socket.create_connection(("127.0.0.1", pod.port), timeout=5) as raw:
        raw.sendall(b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b"413" in raw.recv(100)
    lie = PeerReport(
        contract_version=1,
        pod_index=1,
        epoch=plan.epoch,
        save_id=save.id,
        sealed=[1],
        uploaded=[1, 5_000_000, -3],
    )
    other = lie.model_copy(update={"contract_version": 99})
    assert pod.report(other.to_bytes(), plan.nonce)[0] == 409
    code, body = pod.report(lie.to_bytes(), plan.nonce)
    assert code == 200
    assert json.loads(body)["outcome"] == "InFlight"
    eventually(lambda: rank.outcome(save).outcome is SaveOutcome.IN_FLIGHT, "still in flight")
    assert world.history().manifests == {}
    in_flight = pod.status().in_flight
    assert in_flight is not None
    assert (in_flight.sealed, in_flight.of) == (2, 2)


def test_a_garbage_plan_is_reported_and_changes_nothing(make_world: MakeWorld) -> None:
    world = make_world(1, 1).start()
    pod = world.pods[0]
    status = pod.status()
    assert (status.trainer, status.ready, status.epoch) == (TrainerState.WAITING, True, 0)
    pod.plan_file.write_text("garbage")
    eventually(lambda: "not used" in pod.status().reason, "the reason")
    plan = world.begin()
    eventually(lambda: pod.status().epoch == plan.epoch, "the epoch")
    world.connect()
    for change in (
        {"contract_version": 99},
        {"run_id": "other"},
        {"epoch": plan.epoch - 1 or 0, "attempt": 0},
    ):
        pod.write_plan(plan.model_copy(update=change))
        eventually(lambda: "Also" in pod.status().reason, f"{change} refused")
        assert (pod.status().epoch, pod.status().trainer) == (plan.epoch, TrainerState.RUNNING)
        pod.write_plan(plan)
        eventually(lambda: "Also" not in pod.status().reason, "the good plan taken back")


def test_the_trainers_state_follows_sockets_and_outcome_files(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    pod = world.pods[0]
    world.begin()
    zero, one = world.connect()
    zero.ask(m.ReportProgress(rank=0, step=5, epoch=0, samples=10, loss=1.5, phase="FirstStep"))
    status = pod.status()
    assert status.progress is not None
    assert (status.trainer, status.progress.step) == (TrainerState.RUNNING, 5)
    assert status.phases.first_step is not None
    zero.write_outcome("Finished")
    zero.close()
    eventually(lambda: not pod.status().ranks[0].alive, "rank 0 gone")
    assert pod.get("/readyz")[0] == 200, "it has ended well"
    one.close()
    eventually(lambda: pod.get("/readyz")[0] == 503, "rank 1 died")
    one.write_outcome("Failed", "pod")
    eventually(lambda: pod.status().trainer is TrainerState.ENDED, "Ended")
    assert pod.get("/readyz") == (503, pod.status().reason.encode() + b"\n")
    plan = world.begin()
    eventually(lambda: (s := pod.status()).epoch == plan.epoch and s.ready, "ready again")
    world.connect()
    one.write_outcome("Finished", "pod")  # of the old epoch: changes nothing
    assert pod.status().trainer is TrainerState.RUNNING


def test_silent_pods_are_named_by_both_sides(make_world: MakeWorld) -> None:
    world = make_world(2, 1).start()
    world.begin()
    world.connect()
    assert [pod.status().lost_peers for pod in world.pods] == [[], []]
    world.pods[1].kill()
    eventually(lambda: world.pods[0].status().lost_peers == [1], "pod 1 lost")
    assert world.pods[0].status().quiet_peers == [1]
    world.pods[1].start()
    eventually(lambda: world.pods[0].status().quiet_peers == [], "pod 1 back")
    assert world.pods[0].status().lost_peers == []
    world.pods[0].kill()
    eventually(lambda: world.pods[1].status().lost_peers == [0], "pod 0 lost")


def test_missing_and_wrong_settings_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-id=x"]) == EXIT_USAGE
    assert "RTJ_VOLUME" in capsys.readouterr().err
    fine = [f"--volume={tmp_path}", "--plan-file=/p", "--namespace=a", f"--store-url=file://{tmp_path}"]
    assert main([*fine, "--run-id=../b"]) == EXIT_USAGE
    assert "'../b'" in capsys.readouterr().err


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            HttpServer("127.0.0.1", port, Pages(lambda: None, bytes, lambda _: None))  # type: ignore[arg-type,return-value]


def test_saves_that_every_rank_gives_up_are_counted_and_their_reason_is_shown(make_world: MakeWorld) -> None:
    world = make_world(2, 1).start()
    world.begin()
    zero, one = world.connect()
    coordinator = world.pods[0]
    for step in (1, 2, 3):
        save = Save(world, step)
        for rank in (zero, one):
            rank.ask(m.GiveUp(save_id=save.id, rank=rank.rank, reason="64 bytes are free"))
    status = eventually(lambda: (s := coordinator.status()).consecutive_failures == 3 and s, "3 counted")
    assert status.last_failure == "rank 0: 64 bytes are free"
    other = Save(world, 4)
    one.ask(m.GiveUp(save_id=other.id, rank=1, reason="no memory"))  # pod 0 only hears of it
    status = eventually(lambda: (s := coordinator.status()).consecutive_failures == 4 and s, "4 counted")
    assert status.last_failure == "rank 1: no memory"
    zero.stage(other)
    zero.ask(m.Sealed(save_id=other.id, rank=0))
    eventually(lambda: other.checkpoint in world.history().aborted, "aborted")
    eventually(lambda: coordinator.status().in_flight is None, "ended")
    assert coordinator.status().consecutive_failures == 4, "one save is one failure"
    world.wait(world.save(5))
    status = coordinator.status()
    assert (status.consecutive_failures, status.last_failure) == (0, "")


def test_an_upload_that_meets_a_bug_fails_its_save_and_not_all_that_follow(make_world: MakeWorld) -> None:
    world = make_world(1, 2)
    _, store = in_process(world)
    met: list[str] = []

    def hook(op: str, key: str, when: str) -> None:
        if (op, when) == ("create_large", "before") and key.endswith("00001.distcp") and not met:
            met.append(key)
            raise RuntimeError("a bug")

    store.hook = hook
    world.begin()
    world.connect()
    save = world.save(10)
    world.wait(save, SaveOutcome.FAILED)
    assert len(met) == 1
    assert "rank 1" in world.ranks[0].outcome(save).detail
    assert "RuntimeError: a bug" in world.ranks[0].outcome(save).detail
    assert save.checkpoint in world.history().aborted
    world.wait(world.save(20))

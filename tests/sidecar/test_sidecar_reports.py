"""Reports between sidecars: only who has the plan is heard or believed, and a pod speaks for its own ranks only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from sidecar_world import FakeRank, World, eventually

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.journal import Aborted
from trainer_sidecar.contract.plan import Endpoint
from trainer_sidecar.contract.status import PeerReply, PeerReport, SaveOutcome
from trainer_sidecar.sidecar.peers import Heard, post_report
from trainer_sidecar.sidecar.report_auth import SIGNATURE_HEADER, sign_reply, sign_report

MakeWorld = Callable[..., World]


def report(epoch: int, save_id: str | None = None, **more: object) -> PeerReport:
    return PeerReport.model_validate(
        {"contract_version": CONTRACT_VERSION, "pod_index": 1, "epoch": epoch, "save_id": save_id, **more}
    )


def test_a_report_of_a_stranger_is_answered_403_and_changes_nothing(make_world: MakeWorld) -> None:
    world = make_world(2, 1)
    pod = world.pods[0].start()
    old = world.begin()
    eventually(lambda: pod.status().epoch == old.epoch, "the first plan")
    plan = world.begin()
    eventually(lambda: pod.status().epoch == plan.epoch, "the second plan")
    rank = FakeRank(pod, 0, plan)
    rank.hello()
    world.ranks = [rank]
    save = world.save(3)
    eventually(lambda: pod.status().lost_peers == [1], "pod 1 is silent")
    lie = report(plan.epoch, save.id, sealed=[1], uploaded=[1], faults={1: "gone"}).to_bytes()
    for headers in (
        {},
        {SIGNATURE_HEADER: ""},
        {SIGNATURE_HEADER: "sha256=\u00e9"},
        {SIGNATURE_HEADER: sign_report("guessed", lie)},
        {SIGNATURE_HEADER: sign_report(plan.nonce, lie + b" ")},
        {SIGNATURE_HEADER: sign_reply(plan.nonce, lie)},
        {SIGNATURE_HEADER: sign_report(old.nonce, lie)},
    ):
        assert pod.request("/report", lie, headers)[0] == 403, headers
    status = pod.status()
    assert status.in_flight is not None
    assert (status.in_flight.sealed, status.lost_peers, status.consecutive_failures) == (1, [1], 0)
    assert rank.outcome(save).outcome is SaveOutcome.IN_FLIGHT
    assert not world.history().aborted

    code, body = pod.report(report(old.epoch).to_bytes(), old.nonce)
    assert (code, PeerReply.model_validate_json(body).epoch) == (200, plan.epoch), (
        "it learns of the newer plan"
    )
    assert pod.status().lost_peers == [1], "but does not pass for a pod of the newer one"
    assert pod.report(report(plan.epoch).to_bytes(), plan.nonce)[0] == 200
    assert pod.status().lost_peers == []


def test_a_pod_gives_up_for_its_own_ranks_only(make_world: MakeWorld) -> None:
    world = make_world(3, 1)
    pod = world.pods[0].start()
    plan = world.begin()
    rank = FakeRank(pod, 0, plan)
    rank.hello()
    world.ranks = [rank]
    save = world.save(3)
    for index in (0, 1, 7):
        body = report(plan.epoch, save.id, faults={0: "not mine", 2: "not mine"}, uploaded=[2])
        body = body.model_copy(update={"pod_index": index})
        assert pod.report(body.to_bytes(), plan.nonce)[0] == 200
    eventually(lambda: rank.outcome(save).outcome is SaveOutcome.IN_FLIGHT, "still in flight")
    assert pod.status().consecutive_failures == 0
    assert not world.history().aborted
    mine = report(plan.epoch, save.id, faults={1: "no room"})
    assert pod.report(mine.to_bytes(), plan.nonce)[0] == 200
    world.wait(save, SaveOutcome.FAILED)
    assert [e.reason for e in world.history().entries if isinstance(e, Aborted)] == ["rank 1: no room"]


@contextmanager
def coordinator(signature: str, body: bytes) -> Iterator[int]:
    """Somebody who answers at the coordinator's address."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header(SIGNATURE_HEADER, signature)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


def test_a_reply_counts_only_when_it_is_signed_with_the_plan_in_force(make_world: MakeWorld) -> None:
    plan = make_world(2, 1).fence()
    body = PeerReply(epoch=plan.epoch, save_id="a", outcome=SaveOutcome.COMMITTED, sequence=9).to_bytes()
    for signature in ("", sign_reply("another", body), sign_report(plan.nonce, body)):
        with coordinator(signature, body) as port:
            there = plan.model_copy(update={"coordinator": Endpoint(address="127.0.0.1", port=port)})
            with pytest.raises(ValueError, match="not signed by a sidecar with the plan"):
                post_report(there, report(plan.epoch, "a"))
    with coordinator(sign_reply(plan.nonce, body), body) as port:
        there = plan.model_copy(update={"coordinator": Endpoint(address="127.0.0.1", port=port)})
        assert post_report(there, report(plan.epoch, "a")).outcome is SaveOutcome.COMMITTED


def test_a_pod_that_misses_a_report_is_quiet_and_lost_after_five(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, heard, clock, found = make_world(3, 1).begin(), Heard(10.0), [100.0], []
    monkeypatch.setattr("trainer_sidecar.sidecar.peers.time.monotonic", lambda: clock[0])
    heard.begin(plan)
    for clock[0] in (102.9, 103.0, 109.9, 110.0):
        heard.report(report(plan.epoch, pod_index=2))
        found.append((heard.quiet(), heard.lost()))
    assert found == [([], []), ([1], []), ([1], []), ([1], [1])]

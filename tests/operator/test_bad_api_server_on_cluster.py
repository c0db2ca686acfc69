"""An API server that is slow, busy, at odds, forgetful or silent: the job goes its way, once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bad_api_server import kubeconfig_for
from operator_world import ROOT, Place, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
PORT = 18443
"""In the control plane's own network namespace, where nobody else is."""


class BadServer:
    """Says how the proxy answers, and what it has done."""

    def __init__(self, folder: Path) -> None:
        self.mode_file = folder / "mode"
        self.log_file = folder / "mode.log"
        self.be("fine")

    def be(self, mode: str) -> None:
        self.mode_file.write_text(mode)

    def given(self, fault: str) -> list[str]:
        """Requests that got this fault."""
        lines = self.log_file.read_text().splitlines() if self.log_file.exists() else []
        return [line for line in lines if line.startswith(f"{fault} ")]


@contextmanager
def bad_server(place: Place) -> Iterator[BadServer]:
    found = BadServer(place.folder)
    command = [
        *(sys.executable, str(ROOT / "hack" / "cluster"), "exec-ns", "cp", "--"),
        *(sys.executable, str(Path(__file__).with_name("bad_api_server.py"))),
        *(place.inner_kubeconfig, str(PORT), str(found.mode_file)),
    ]
    process = subprocess.Popen(command)
    try:
        yield found
    finally:
        process.terminate()
        process.wait(30)


def test_a_job_goes_its_way_once_through_every_bad_answer_of_the_api_server(place: Place) -> None:
    def suspend(value: str) -> None:
        patch = f'{{"spec":{{"suspend":{value}}}}}'
        place.kubectl("-n", place.namespace, "patch", "rtj", "bad", "--type=merge", "-p", patch)

    with bad_server(place) as server:
        through = place.folder / "kubeconfig.bad"
        through.write_text(kubeconfig_for(PORT))
        place.start(kubeconfig=str(through))

        server.be("busy")
        place.apply("bad", nodes=1, elastic={"minNodes": 1, "maxNodes": 1}, env={"STEPS": "100000"})
        place.wait_phase("bad", "Running")
        committed = place.wait_commit("bad")
        codes = server.given("busy")
        assert len(codes) > 4, "refused with 503 and 429 again and again"

        server.be("conflict")
        suspend("true")
        place.wait_phase("bad", "Suspended")
        assert any("/resumabletrainingjobs/bad/status" in line for line in server.given("conflict"))
        suspend("false")
        place.wait_phase("bad", "Running")

        server.be("gone")  # of watches that begin: the ones before end by themselves within minutes
        place.stop()
        place.start(kubeconfig=str(through))
        eventually(lambda: server.given("gone"), "a watch that was refused as too old", 60)
        committed = place.wait_commit("bad", committed)

        server.be("slow")
        suspend("true")
        place.wait_phase("bad", "Suspended")
        suspend("false")
        place.wait_phase("bad", "Running", 180)
        assert server.given("slow")

        server.be("silent")  # the resync once a minute must find it
        suspend("true")
        place.wait_phase("bad", "Suspended", 180)
        assert server.given("silent"), "an event was held back"

    attempts = place.attempts("bad")
    assert [a["cause"] for a in attempts] == ["First", "Resumed", "Resumed"]
    assert place.status("bad")["counters"]["failures"] == 0
    assert place.status("bad")["lastCommitted"]["step"] > committed

"""The launcher with real torchrun: one long life per test, since importing torch is what costs time."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.launch import descendants
from trainer_sidecar.sidecar.workdir import install_launcher

if TYPE_CHECKING:
    from conftest import Pod

    StartPod = Callable[..., Pod]

pytestmark = pytest.mark.torchrun


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pids: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if not gone(pid)]
        time.sleep(0.01)


def wait_for_text(pod: Pod, text: str, times: int = 1, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while pod.text().count(text) < times:
        assert time.monotonic() < deadline, pod.text()
        time.sleep(0.01)


def test_a_killed_rank_is_named_and_a_newer_plan_relaunches_in_place_and_an_order_saves(
    start_pod: Any, tmp_path: Path
) -> None:
    """The zipapp that the sidecar installs, through a failure, a fence, an order and a stop."""
    assert install_launcher_for(tmp_path)
    pod = start_pod(command=[sys.executable, str(Volume(tmp_path).launcher)])
    pod.publish(1)
    first = pod.started(1)
    pod.says_hello(1)
    below = descendants(pod.process.pid)
    assert len(below) >= 1 + 2 + 2 + 2, "torchrun, guards, ranks and what the ranks started"
    os.kill(first[1], signal.SIGKILL)
    killed_at = time.time()
    outcome = Outcome.model_validate(pod.outcome(1))
    assert (outcome.kind, outcome.epoch, outcome.attempt) == (OutcomeKind.FAILED, 1, 1)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.exit_code, outcome.failure.signal) == (1, -9, "SIGKILL")
    assert "rank 1 is about to run" in outcome.failure.error
    assert "rank 0 is" not in outcome.failure.error, "each rank's stderr is kept apart"
    assert pod.events("outcome")[0]["time"] - killed_at < 1.0
    wait_gone(below)
    assert pod.process.poll() is None, "a failed launcher stays up and waits for a plan"

    pod.publish(3)
    second = pod.started(3)
    pod.says_hello(3)
    below = descendants(pod.process.pid)
    os.kill(second[0], signal.SIGSTOP)  # a hung rank changes nothing
    pod.publish(5)
    pod.started(5)
    wait_gone(list(second.values()))
    assert pod.outcome(3)["kind"] == "Fenced"
    spare = {pid for pid in below if not gone(pid)}
    assert len(spare) <= 1, "only a spare torchrun may be left of what ran before"

    pod.publish(4)  # an older plan changes nothing
    pod.publish(5, "SaveAndExit")
    outcome = Outcome.model_validate(pod.outcome(5))
    assert (outcome.kind, outcome.step) == (OutcomeKind.SAVED_AND_STOPPED, 7)
    assert pod.volume.order(5).read_text() == "SaveAndExit"
    assert not pod.volume.order(3).exists()
    assert pod.process.poll() is None, "it stays up until Stop (O3)"
    pod.publish(5, "Stop")
    assert pod.wait() == 143
    assert json.loads(pod.termination.read_text())["kind"] == "SavedAndStopped"


def install_launcher_for(root: Path) -> bool:
    volume = Volume(root)
    volume.work.mkdir(parents=True)
    return install_launcher(volume)


def test_outcomes_of_ranks_beat_exit_codes_and_only_finished_ends_the_launcher(start_pod: Any) -> None:
    modes = {1: "raise", 3: "library error", 5: "refuse", 7: "leave", 9: "export", 11: "finish"}
    pod = start_pod(modes=modes)
    pod.publish(1)
    outcome = pod.outcome(1)
    assert outcome["kind"] == "Failed"
    assert outcome["failure"]["rank"] == 1
    assert outcome["failure"]["exitCode"] == 1
    assert outcome["failure"]["error"].rstrip().endswith("RuntimeError: the loss of rank 1 is not a number")
    assert "the loss of rank 1 is not a number" in outcome["message"]
    assert "the loss of rank 1 is not a number" in pod.text(), "stderr still reaches the container's log"

    pod.publish(3)
    outcome = pod.outcome(3)
    assert (outcome["kind"], outcome["step"], outcome["message"]) == (
        "Failed",
        12,
        "out of memory in step 12",
    )
    assert outcome["failure"] == {"rank": 0, "exitCode": 5, "error": "Traceback: boom"}

    pod.publish(5)
    outcome = pod.outcome(5)
    assert (outcome["kind"], outcome["message"]) == ("ResumeRefused", "missing key layers.7.weight")

    pod.publish(7)
    outcome = pod.outcome(7)
    assert (outcome["kind"], outcome["failure"]["rank"], outcome["failure"]["exitCode"]) == ("Failed", 0, 0)
    assert "ended inside its Session" in outcome["message"], "exit code 0 alone finishes no training"

    pod.publish(9)
    outcome = pod.outcome(9)
    assert (outcome["kind"], outcome["step"], outcome["failure"]["exitCode"]) == ("Failed", 20, 1)
    assert outcome["message"] == (
        "rank 0 exited with code 1 after its training (step 20 is committed): OSError: no space for the model"
    )

    pod.publish(11)
    assert pod.wait(60) == 0
    assert pod.outcome(11)["kind"] == "Finished"
    assert json.loads(pod.termination.read_text())["step"] == 20
    (crashed,) = [e for e in pod.events("rank ended") if e["epoch"] == 11 and e["rank"] == 0]
    assert (crashed["code"], crashed["well"]) == (-signal.SIGABRT, True)


def test_sigterm_saves_then_exits_143_without_reaching_torchrun(start_pod: Any) -> None:
    pod = start_pod()
    pod.publish(1)
    pod.started(1)
    pod.says_hello(1)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    outcome = pod.outcome(1)
    assert (outcome["kind"], outcome["step"]) == ("SavedAndStopped", 7)
    assert pod.volume.order(1).exists()


def test_a_rank_that_hangs_writes_its_stack_when_the_plan_asks_and_one_without_a_handler_is_not_killed(
    start_pod: Any,
) -> None:
    pod = start_pod(modes={1: "hang"})
    pod.publish(1)
    ranks = pod.started(1)
    wait_for_text(pod, "rank 1 hangs")
    pod.publish(1, dumpStacks=1)
    wait_for_text(pod, "in waits_for_a_peer_that_never_comes")
    pod.publish(1, dumpStacks=1)
    pod.publish(1, dumpStacks=2)
    wait_for_text(pod, "in waits_for_a_peer_that_never_comes", times=2)
    assert [e["rank"] for e in pod.events("stacks")] == [1, 1]
    assert [e["rank"] for e in pod.events("no stacks: the rank has not joined, or has ended")] == [0, 0]
    assert not any(map(gone, ranks.values())), "nobody died of being asked"


def test_stop_kills_ranks_that_run_and_a_dead_launcher_leaves_nothing(start_pod: Any) -> None:
    pod = start_pod()
    pod.publish(1)
    ranks = pod.started(1)
    below = descendants(pod.process.pid)
    pod.publish(1, "Stop")
    assert pod.wait() == 143
    assert pod.outcome(1)["kind"] == "Stopped"
    wait_gone(below)

    pod = start_pod()
    pod.publish(1)
    ranks = pod.started(1)
    pod.process.kill()
    wait_gone(list(ranks.values()))


def test_torchrun_that_cannot_start_is_a_failure_with_its_own_words(start_pod: Any) -> None:
    pod = start_pod()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        pod.publish(1, master={"address": "127.0.0.1", "port": taken.getsockname()[1]})
        outcome = pod.outcome(1)
    assert outcome["kind"] == "Failed"
    assert "torchrun exited with code 1" in outcome["message"]
    assert "EADDRINUSE" in outcome["message"]


MALFORMED = (
    {"epoch": None},
    {"epoch": "9"},
    {"epoch": 9, "topology": None},
    {"dumpStacks": "x"},
    {"contractVersion": None},
)


def test_a_plan_that_somebody_has_edited_by_hand_is_refused_by_field_and_ranks_train_on(
    start_pod: Any,
) -> None:
    pod = start_pod()
    pod.publish(1)
    pids = pod.started(1)
    whole = json.loads(pod.plan_file.read_text())
    for number, changes in enumerate(MALFORMED, 1):
        edited = pod.plan_file.with_suffix(".edited")
        edited.write_text(json.dumps({**whole, **changes}))
        edited.rename(pod.plan_file)
        pod.until_events("plan refused", number)
    faults = [event["fault"] for event in pod.events("plan refused")]
    assert faults == [
        "epoch is None, it must be of type int",
        "epoch is '9', it must be of type int",
        "topology.nodes is None, it must be of type int",
        "dumpStacks is 'x', it must be of type int",
        "contractVersion is None, it must be of type int",
    ]
    assert pod.process.poll() is None
    assert not any(gone(pid) for pid in pids.values())
    pod.publish(1, "Stop")
    assert pod.wait() == 143

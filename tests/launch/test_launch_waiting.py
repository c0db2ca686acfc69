"""What the launcher does before any rank runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainer_sidecar import launch
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar.workdir import launcher_listens, prepare


def test_without_a_plan_it_gives_up_after_the_startup_timeout_and_says_so(start_pod: Any) -> None:
    pod = start_pod(RTJ_STARTUP_TIMEOUT="0.3")
    assert pod.wait() == 1
    outcome = json.loads(pod.termination.read_text())
    assert outcome["kind"] == "Failed"
    assert "no plan newer than epoch 0" in outcome["message"]
    assert str(pod.plan_file) in outcome["message"]


def test_a_plan_of_another_contract_version_is_refused_with_both_versions(start_pod: Any) -> None:
    pod = start_pod()
    pod.publish(1, contractVersion=2)
    assert pod.wait() == 1
    message = json.loads(pod.termination.read_text())["message"]
    assert "contract version 2" in message
    assert "launcher 1" in message


def test_an_empty_plan_file_is_no_plan_and_sigterm_ends_the_wait(start_pod: Any) -> None:
    pod = start_pod()
    pod.plan_file.write_bytes(b"")
    ready = pod.volume.launcher_socket
    assert ready.name == launch.RankReports.NAME
    while not ready.exists():
        assert pod.process.poll() is None
    while not launcher_listens(pod.volume):  # the name is there a moment before it is listened to
        assert pod.process.poll() is None
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    assert json.loads(pod.termination.read_text())["kind"] == "Stopped"
    assert launcher_listens(pod.volume) is False


def test_a_volume_without_a_launcher_yet_is_no_sign_that_one_is_gone(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    prepare(volume)
    assert launcher_listens(volume) is None


def test_an_order_to_save_before_any_rank_ran_is_stopped_and_stays_up_until_stop(start_pod: Any) -> None:
    pod = start_pod()
    pod.publish(3, "SaveAndExit")
    assert pod.outcome(3)["kind"] == "Stopped"
    assert pod.process.poll() is None
    pod.publish(3, "Stop")
    assert pod.wait() == 143


def test_a_plan_of_another_run_is_not_obeyed_and_is_named_in_the_end(start_pod: Any) -> None:
    pod = start_pod(RTJ_NAMESPACE="local", RTJ_RUN_ID="x", RTJ_STARTUP_TIMEOUT="15")
    pod.publish(5, "Stop", runId="other")
    pod.until_events("plan refused")
    pod.publish(5, "Stop", namespace="elsewhere")
    pod.until_events("plan refused", 2)
    assert pod.wait() == 1
    assert pod.events("plan seen") == []
    message = json.loads(pod.termination.read_text())["message"]
    assert "run elsewhere/x, this pod belongs to run local/x" in message


def test_the_plan_of_its_own_run_is_obeyed_after_one_of_another(start_pod: Any) -> None:
    pod = start_pod(RTJ_NAMESPACE="local", RTJ_RUN_ID="x")
    pod.publish(9, "Stop", runId="other")
    pod.until_events("plan refused")
    pod.publish(1, "Stop")
    assert pod.wait() == 143
    assert [event["epoch"] for event in pod.events("plan seen")] == [1]


def test_wrong_use_is_explained() -> None:
    for arguments, words in (
        (["train.py"], "usage: rtj-launch -- train.py"),
        (["--", "train.py"], "RTJ_VOLUME"),
    ):
        ended = subprocess.run(
            [sys.executable, launch.__file__, *arguments], env={}, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 2
        assert words in ended.stderr

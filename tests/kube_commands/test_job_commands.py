"""`rtj status`, `attempts`, `why`, `suspend` and `resume` against an API server; and what they say when it refuses."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_desk import Desk
from job_values import CHECKPOINT, event, job, pod

from trainer_sidecar import cli
from trainer_sidecar.kube_commands.words import Paint, span


def obey(found: dict[str, Any]) -> None:
    """An operator in one line: it suspends and goes on at once."""
    found["status"] |= {
        "phase": "Suspended" if found["spec"]["suspend"] else "Running",
        "observedGeneration": found["metadata"]["generation"],
    }


def test_status_lists_the_jobs_of_the_contexts_namespace(desk: Desk) -> None:
    desk.server.put(job("sft"))
    desk.server.put(job("dpo", namespace="other"))
    lines = desk.rtj("status").splitlines()
    assert lines[0].split()[:4] == ["NAME", "PHASE", "REASON", "NODES"]
    assert lines[1].split()[:6] == ["sft", "Running", "RanksTraining", "2/2", "dp4xtp1xpp1", "450"]
    assert len(lines) == 2
    assert {row["name"] for row in desk.json("status", "-A")} == {"sft", "dpo"}
    assert "dpo" in desk.rtj("status", "-n", "other")


def test_status_of_one_job_tells_what_is_safe_and_what_needs_a_look(desk: Desk) -> None:
    found = desk.server.put(job())
    found["status"]["conditions"][1] |= {
        "status": "True",
        "reason": "GraceTooShort",
        "message": "30 s is too short",
    }
    text = desk.rtj("status", "sft")
    assert "team/sft" in text
    assert re.search(rf"step 400, \d+m(\d+s)? ago: {CHECKPOINT}", text)
    assert "step 450, 3600 samples, loss 2.125" in text
    assert (
        "50 steps, 400 samples, 95 s of training; 150 steps, 1200 samples, 1995 s of training since the"
        in text
    )
    assert re.search(
        r"interval: +every 10m \(about 300 steps\), Fixed; every 4m wastes least: a save costs", text
    )
    assert "costs 1.5 s, work is lost every 5h16m, a restart takes 4s; 1.8% of the time is lost" in text
    assert "Degraded: 30 s is too short" in text
    assert "\x1b" not in text, "colours are for terminals"
    told = desk.json("status", "sft")
    assert told["phase"] == "Running"
    assert told["status"]["lastCommitted"]["checkpointId"] == CHECKPOINT


def test_colours_are_for_terminals_and_for_those_who_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Paint(Terminal()).phase("Failed") == "\x1b[31mFailed\x1b[0m"
    assert Paint(io.StringIO()).phase("Failed") == "Failed"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Paint(Terminal()).phase("Failed") == "Failed"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m"), (3725, "1h2m"), (86400 * 3, "3d"), (90061, "1d1h")],
)
def test_a_duration_is_told_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_attempts_tell_cause_start_end_and_where_the_time_went(desk: Desk) -> None:
    desk.server.put(job())
    text = desk.rtj("attempts", "sft", "--messages")
    first, second = text.splitlines()[1:]
    assert "First" in first
    assert "scratch" in first
    assert "CUDA error" in first
    assert "restore 2.0" in second
    assert "runs" in second
    assert [record["attempt"] for record in desk.json("attempts", "sft")] == [1, 2]


def test_why_puts_status_rules_and_events_into_sentences(desk: Desk) -> None:
    desk.server.put(job())
    desk.server.pods = [pod("sft-p1-0-aaaaa", 0)]
    desk.server.events = [event("Resumed", "attempt 2 restored step 400 in 2.0 s", 980)]
    text = " ".join(desk.rtj("why", "sft").split())
    assert "Now: The job is Running: step 450" in text
    assert "The ranks save every 100 steps or 600 s, whichever comes first." in text
    assert "It then goes on from step 400, the newest commit" in text
    assert "If everything stopped now, 50 steps (400 samples, 1m35s) would be run again." in text
    assert "Attempt 1 ended as Failed on node gpu-7" in text
    assert "Resumed: attempt 2 restored step 400" in text
    told = desk.json("why", "sft")
    assert told["job"] == "team/sft"
    assert set(told) == {"job", "now", "next", "safe", "before", "look_at", "you_can", "events"}


def test_why_goes_on_without_the_rights_to_pods_and_events_and_says_so(desk: Desk) -> None:
    desk.server.put(job())
    desk.server.forbidden = {"list pods", "list events"}
    assert "Running" in desk.rtj("why", "sft")
    assert "the right to list pods in namespace team is missing" in desk.said
    assert "the right to list events in namespace team is missing" in desk.said


def test_suspend_and_resume_set_the_switch_and_wait_until_it_is_obeyed(desk: Desk) -> None:
    found = desk.server.put(job())
    desk.server.on_patch = obey
    assert "Suspended" in desk.rtj("suspend", "sft", "--wait")
    assert found["spec"]["suspend"] is True
    assert desk.json("resume", "sft", "--wait") == [
        {"name": "sft", "suspend": False, "phase": "Running", "committed step": 400}
    ]
    desk.rtj("resume", "sft")
    assert "not told to suspend" in desk.said


def test_a_wait_ends_with_what_came_instead_or_where_it_stands(desk: Desk) -> None:
    found = desk.server.put(job())

    def fail(job: dict[str, Any]) -> None:
        job["status"] |= {"phase": "Failed", "message": "3 failures", "observedGeneration": 2}

    desk.server.on_patch = fail
    desk.rtj("suspend", "sft", "--wait", code=1)
    assert "job sft is Failed, not Suspended: 3 failures" in desk.said
    desk.rtj("suspend", "sft", code=1)
    assert "there is nothing to suspend" in desk.said
    found["status"]["phase"] = "Running"
    found["spec"]["suspend"] = False
    desk.server.on_patch = lambda job: None
    desk.rtj("suspend", "sft", "--wait", "--timeout", "1", code=1)
    assert "job sft is Running after 1 s, not Suspended: rtj why sft" in desk.said


def test_a_name_that_is_not_there_names_those_near_it(desk: Desk) -> None:
    for name in ("sft-llama", "sft-qwen", "dpo"):
        desk.server.put(job(name))
    desk.rtj("why", "sft-lama", code=1)
    assert desk.said == "rtj: no job sft-lama in namespace team; there is sft-llama, sft-qwen\n"
    desk.rtj("why", "zzz", code=1)
    assert "it has dpo, sft-llama, sft-qwen" in desk.said
    desk.rtj("why", "zzz", "-n", "empty", code=1)
    assert "namespace empty, which has no job" in desk.said


def test_a_missing_right_is_named_as_a_role_would_write_it(desk: Desk) -> None:
    desk.server.put(job())
    desk.server.forbidden = {"patch resumabletrainingjobs.resumabletraining.io"}
    desk.rtj("suspend", "sft", code=1)
    assert (
        "the right to patch resumabletrainingjobs.resumabletraining.io in namespace team is missing"
        in desk.said
    )
    desk.server.token = "another"
    desk.rtj("status", code=1)
    assert "does not accept these credentials" in desk.said


def test_a_cluster_without_the_definition_says_what_to_install(desk: Desk) -> None:
    desk.server.installed = False
    desk.rtj("status", code=1)
    assert "install the operator's chart" in desk.said


def test_a_cluster_that_cannot_be_reached_is_no_traceback(desk: Desk, tmp_path: Path) -> None:
    desk.rtj("status", "--context", "elsewhere", code=69)
    assert "the cluster at http://127.0.0.1:9 cannot be reached" in desk.said
    assert "Connection refused" in desk.said
    assert cli.main(["status", "--kubeconfig", str(tmp_path / "none")]) == 69
    _, said = desk.capture()
    assert said.endswith("none: no such file: name one with --kubeconfig and --context\n")


@pytest.mark.parametrize(
    "content", [b"a: [", b"[]", b"text", b"\xff\xfe\x00", b"contexts: 3\ncurrent-context: a"]
)
def test_a_file_that_is_no_kubeconfig_is_no_traceback(desk: Desk, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    assert cli.main(["status", "--kubeconfig", str(path)]) == 69
    _, said = desk.capture()
    assert said.startswith(f"rtj: no cluster: kubeconfig {path}: ")
    assert said.endswith(": name one with --kubeconfig and --context\n")
    assert said.count("\n") == 1
    desk.rtj("status", "--context", "none", code=69)
    assert "context none" in desk.said


def test_a_job_of_another_schema_names_its_fields(desk: Desk) -> None:
    found = desk.server.put(job())
    found["status"]["counters"]["attempts"] = "many"
    desk.rtj("status", "sft", code=1)
    assert "status.counters.attempts" in desk.said


def test_text_of_a_job_cannot_command_the_terminal(desk: Desk) -> None:
    desk.server.put(job(message="\x1b]0;owned\x07 step", reason="RanksTraining"))
    assert "\x1b" not in desk.rtj("status", "sft")
    assert "\x1b" not in desk.rtj("why", "sft")


def test_a_full_disk_behind_the_output_is_no_traceback(desk: Desk) -> None:
    desk.server.put(job())
    command = [sys.executable, "-m", "trainer_sidecar.cli", "status", "--kubeconfig", str(desk.kubeconfig)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (
        1,
        "rtj: the output cannot be written: No space left on device\n",
    )

"""`rtj logs`: the pod of the rank that failed first comes first, wherever its successor runs by now."""

from __future__ import annotations

import copy

import pytest
from cluster_desk import Desk
from job_values import RECORDS, job, pod


@pytest.fixture
def failed(desk: Desk) -> Desk:
    """Rank 3, in the pod with index 1, failed first."""
    desk.server.put(job(attempts=copy.deepcopy(RECORDS[:1]), phase="Recovering"))
    desk.server.pods = [pod("sft-p1-0-aaaaa", 0), pod("sft-p1-1-abcde", 1)]
    desk.server.logs = {
        "sft-p1-0-aaaaa/trainer": "gloo: connection closed by peer\n",
        "sft-p1-1-abcde/trainer": "step 411\nstep 412\nRuntimeError: CUDA error\n",
        "sft-p1-0-aaaaa/rtj-sidecar": "committed\n",
        "sft-p1-1-abcde/rtj-sidecar": "sealed\n",
    }
    return desk


def test_the_first_failing_ranks_log_comes_first_with_the_reason(failed: Desk) -> None:
    text = failed.rtj("logs", "sft")
    assert text.startswith("==> sft-p1-1-abcde on gpu-1, trainer <==\n    attempt 1: pod sft-p1-1-abcde")
    assert text.endswith("RuntimeError: CUDA error\n")
    assert "gloo" not in text
    everything = failed.rtj("logs", "sft", "--all")
    assert everything.index("CUDA error\n") < everything.index("gloo")


def test_a_rank_a_container_and_a_number_of_lines_can_be_chosen(failed: Desk) -> None:
    assert "gloo" in failed.rtj("logs", "sft", "--rank", "1")
    assert "sealed" in failed.rtj("logs", "sft", "--sidecar")
    failed.server.logs["sft-p1-0-aaaaa/rtj-sidecar"] = many = "x" + "é" * 40_000 + "\n"
    assert many in failed.rtj("logs", "sft", "--rank", "1", "--sidecar"), "letters lie across two chunks"
    assert "step 411" not in failed.rtj("logs", "sft", "--tail", "1")
    assert failed.json("logs", "sft", "--tail", "1") == [
        {"pod": "sft-p1-1-abcde", "container": "trainer", "log": "RuntimeError: CUDA error\n"}
    ]
    failed.rtj("logs", "sft", "--rank", "4", code=1)
    assert "there is no rank 4: the world size is 4" in failed.said


def test_a_pod_that_went_is_followed_to_the_one_that_has_its_index_now(failed: Desk) -> None:
    failed.server.pods = [pod("sft-p2-0-xxxxx", 0, placement=2), pod("sft-p2-1-yyyyy", 1, placement=2)]
    failed.server.logs = {"sft-p2-1-yyyyy/trainer": "restored step 400\n"}
    assert "restored step 400" in failed.rtj("logs", "sft")


def test_without_pods_what_the_status_kept_of_the_failure_is_shown(failed: Desk) -> None:
    failed.server.pods = []
    failed.rtj("logs", "sft", code=1)
    assert "job sft has no pods now (Recovering); attempt 1: pod sft-p1-1-abcde" in failed.said
    assert "RuntimeError: CUDA error" in failed.said


def test_a_missing_right_to_logs_is_named(failed: Desk) -> None:
    failed.server.forbidden = {"get pods/log"}
    failed.rtj("logs", "sft", code=1)
    assert "the right to get pods/log in namespace team is missing" in failed.said

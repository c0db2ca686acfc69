"""Every command of docs/kubectl-rtj.md is run, in its order, on one job; its role allows what they ask for."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import store_world as world
import yaml
from cluster_desk import Desk
from job_values import job, pod

from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kubectl-rtj.md").read_text()
KEYS = RunKeys("team", "sft")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


LINES = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def sft(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """The job of the page: two pods, a run with three commits, an operator that obeys the switch at once."""
    monkeypatch.chdir(tmp_path)
    store = open_store(f"file://{tmp_path}/store")
    journal = Journal(store, KEYS, parallel=1, pause=world.no_pause)
    fenced = world.fence_and_pick(journal, world.request())
    desk.checkpoints = [world.save(store, fenced, step, keys=KEYS).checkpoint_id for step in (100, 200, 300)]
    desk.server.put(job("sft", store=f"file://{tmp_path}/store"))
    desk.server.pods = [pod("sft-p1-0-aaaaa", 0), pod("sft-p1-1-abcde", 1)]
    desk.server.logs = {
        f"{p['metadata']['name']}/{c}": "x\n" for p in desk.server.pods for c in ("trainer", "rtj-sidecar")
    }

    def obey(found: dict[str, Any]) -> None:
        phase = "Suspended" if found["spec"].get("suspend") else "Running"
        found["status"] |= {"phase": phase, "observedGeneration": found["metadata"]["generation"]}

    desk.server.on_patch = obey
    return desk


def test_the_commands_of_the_page_do_what_it_says(sft: Desk, tmp_path: Path) -> None:
    run = [shlex.split(line)[2:] for line in LINES if line.startswith("kubectl rtj ")]
    assert len(run) >= 15
    for words in run:
        sft.rtj(*[sft.checkpoints[0] if word == "CHECKPOINT" else word for word in words])
    history = Journal(open_store(f"file://{tmp_path}/store"), KEYS).read()
    assert set(history.quarantined) == set(sft.checkpoints[1:])
    assert history.quarantined[sft.checkpoints[1]].reason.endswith("loss went up after step 200")
    assert history.holds == {}
    assert ("team", "sft-again") in sft.server.jobs
    assert "<svg" in (tmp_path / "sft.html").read_text()
    role = yaml.safe_load(blocks("yaml")[0])
    allowed = {
        (verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    assert allowed == {(verb, resource.split(".")[0]) for verb, resource in sft.server.used}


def test_the_other_lines_of_the_page_are_known() -> None:
    others = [line for line in LINES if not line.startswith("kubectl rtj ")]
    assert others == [
        "pip install --find-links DIST 'resumable-training[kubectl]'",
        "source <(rtj completion bash)",
    ]


def test_what_the_page_installs_is_in_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("kubernetes") for name in project["optional-dependencies"]["kubectl"])
    for name in ("rtj", "kubectl-rtj", "kubectl_complete-rtj"):
        assert callable(EntryPoint(name, project["scripts"][name], "console_scripts").load())


def test_the_sentences_that_the_page_shows_are_those_that_are_said(sft: Desk) -> None:
    """Headings and fixed words of the sample; numbers and names are its own."""
    sample = blocks("text")[0]
    found = sft.server.jobs["team", "sft"]
    found["status"] |= {
        "phase": "Recovering", "reason": "BackingOff", "retryAt": "2999-01-01T00:00:00.000000Z",
        "message": "next attempt in 12 s: 1 failures without a newer commit",
        "counters": {"attempts": 2, "failures": 1, "withoutProgress": 1},
    }  # fmt: skip
    found["status"]["attempts"] = found["status"]["attempts"][:1]
    said = " ".join(sft.rtj("why", "sft").split())
    for words in (
        "Now: The job is Recovering: next attempt in 12 s: 1 failures without a newer commit",
        "BackingOff means: Waiting before the next attempt, after failures without progress.",
        "attempt 3 begins, from step 400, the newest commit, unless it is under quarantine by then.",
        "1 failure without a newer commit so far; 2 more and the job is Failed.",
        "rank 3 ended with exit code 1: RuntimeError: CUDA error",
        "You can: rtj logs sft",
    ):
        assert words in said
        assert words in " ".join(sample.split())

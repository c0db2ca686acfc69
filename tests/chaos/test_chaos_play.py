"""Faults that find no target are tried again, what cannot be fired is told, and a job that stands still is stuck."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from hack.chaos import play, processes
from hack.chaos.journals import Journals
from hack.chaos.play import Play, finish
from hack.chaos.record import Hit, NotYetError, Story
from hack.chaos.scene import Scene
from hack.chaos.schedule import Fault, Kind, Schedule
from hack.cluster_world import Job, World
from trainer_sidecar.store.memory import MemoryStore


@dataclass
class Standing:
    """A job in a phase, and the pace that it was told."""

    name: str
    phase: str
    told: list[float] = field(default_factory=list)

    @property
    def status(self) -> dict[str, str]:
        return {"phase": self.phase, "reason": "R", "message": "M"}

    def pace(self, seconds: float) -> None:
        self.told.append(seconds)


def scene_of(folder: Path, *jobs: Standing) -> Scene:
    for job in jobs:
        (folder / job.name).mkdir()
        (folder / job.name / f"{job.name}-e1-r0.jsonl").write_text("{}\n")
    return Scene(World(folder), cast(list[Job], list(jobs)))


def test_a_failed_job_and_one_that_makes_no_step_are_stuck_and_a_complete_one_is_not(tmp_path: Path) -> None:
    jobs = [Standing("done", "Complete"), Standing("broken", "Failed"), Standing("asleep", "Running")]
    story = Story()
    assert sorted(finish(scene_of(tmp_path, *jobs), story, 0.0, print)) == ["asleep", "broken"]
    assert any("asleep is stuck: Running/R: M" in sentence for sentence in story.troubles)
    assert all(job.told == [0.0] for job in jobs)


def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tries: int, patience: float) -> Story:
    """A rank's kill that succeeds with its try number `tries`."""
    left = [NotYetError("no rank runs")] * (tries - 1)

    def kill_rank(scene: Any, draw: int) -> Hit:
        if left:
            raise left.pop()
        return Hit("rank 0", 1.0, 2.0, "gone", ("a",))

    monkeypatch.setattr(processes, "kill_rank", kill_rank)
    monkeypatch.setattr(Play, "settle", lambda self: None)
    monkeypatch.setattr(play, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(play, "PATIENCE_SECONDS", patience)
    one = Play(scene_of(tmp_path), Journals(MemoryStore("memory://play"), {}), 3, 100, print)
    one.run(Schedule(1, (Fault(0.0, Kind.KILL_RANK, 0),)))
    return one.story


def test_a_fault_without_a_target_is_tried_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    story = played(monkeypatch, tmp_path, tries=5, patience=60.0)
    assert [fired.hit.target for fired in story.fired] == ["rank 0"]
    assert story.troubles == []


def test_a_fault_that_never_finds_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    story = played(monkeypatch, tmp_path, tries=1_000_000, patience=0.2)
    assert story.fired == []
    assert story.troubles == ["kill rank could not be fired: no rank runs"]

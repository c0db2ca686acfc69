"""D9: a pod of an old attempt wakes up and tries to commit. It cannot, wherever it was frozen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from drill_steps import attempt, begin_save, check_every_byte, commit, picked
from sidecar_world import Pod, World, eventually

from trainer_sidecar.contract.journal import Manifest
from trainer_sidecar.sidecar.fault import POINTS

pytestmark = [pytest.mark.s3, pytest.mark.slow]
MakeWorld = Callable[..., World]


def frozen(pod: Pod) -> bool:
    assert pod.process is not None
    assert pod.process.poll() is None, pod.log()
    return Path(f"/proc/{pod.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("point", [p for p in POINTS if p not in ("after-claim", "before-latest")])
def test_d9_a_pod_frozen_before_its_commit_cannot_commit_when_it_wakes_up(
    make_world: MakeWorld, point: str
) -> None:
    world = make_world(1, 2).start()
    attempt(world)
    first = commit(world, 10)
    (old,) = world.pods
    old.kill()
    old.launch(point, RTJ_FAULT_SIGNAL="SIGSTOP")
    old.wait_up()
    for rank in world.ranks:
        rank.connect()
        rank.hello()
    late = begin_save(world, 20)
    eventually(lambda: frozen(old), f"frozen at {point}")
    old_ranks, world.ranks = world.ranks, []

    fenced = attempt(world, world.place("second"))
    assert picked(fenced) == first.checkpoint
    mine = commit(world, 15)
    assert old.process is not None
    os.kill(old.process.pid, signal.SIGCONT)
    eventually(lambda: "Fenced" in old.log() or "fenced" in old.log(), "the old pod has learned it")
    eventually(lambda: old.status().in_flight is None, "its save has an outcome")
    assert old.status().fenced or "has fenced epoch" in old.log() or "was fenced by attempt" in old.log()

    history = world.history()
    assert late.checkpoint not in history.manifests
    epochs = [e.epoch for e in history.entries if isinstance(e, Manifest)]
    assert epochs == sorted(epochs)
    assert history.lineage[0].checkpoint_id == mine.checkpoint
    newer = commit(world, 25)
    assert world.history().lineage[0].checkpoint_id == newer.checkpoint
    check_every_byte(world)
    for rank in old_ranks:
        rank.close()
    old.kill()

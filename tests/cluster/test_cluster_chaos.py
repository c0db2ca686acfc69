"""A short chaos soak: every kind of fault once against two jobs, and the same audit as after half an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.chaos.report import tally
from hack.chaos.schedule import Kind, each_once
from hack.chaos.soak import Size, keep, soak
from hack.cluster_world import World

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
SEED = 11
GAP_SECONDS = (6.0, 10.0)
SIZE = Size(jobs=2, steps=240, interval=10, idle=240.0)


def test_a_soak_with_each_kind_of_fault_ends_with_a_clean_audit(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = each_once(SEED, tuple(Kind), GAP_SECONDS)
    outcome = soak(world, schedule, SIZE, lambda text: print(text, flush=True))
    if outcome.wrong:
        keep(world, outcome, tmp_path)
    told = capsys.readouterr().out + tally(outcome, 0.0)
    assert not outcome.wrong, f"{told}\nlogs: {tmp_path}"
    assert {fired.fault.kind for fired in outcome.story.fired} == set(Kind), told
    assert all(proof.holds for proofs in outcome.proofs.values() for proof in proofs), told
    assert len(outcome.proofs) == SIZE.jobs, told

"""D4: `latest.json` is missing, garbage, stale, points to nothing or ahead. The newest commit is found all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drill_steps import attempt, check_every_byte, commit, picked
from sidecar_world import World

from trainer_sidecar.contract.journal import Latest

pytestmark = [pytest.mark.s3, pytest.mark.slow]
MakeWorld = Callable[..., World]


def test_d4_the_newest_commit_is_found_whatever_latest_says(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    attempt(world)
    first = commit(world, 10)
    stale = world.store.get(world.keys.latest)
    newest = commit(world, 20)
    nothing = Latest(sequence=3, checkpoint_id="000000000099-0000000001-00000000", step=99).to_bytes()
    ahead = Latest(sequence=900, checkpoint_id=first.checkpoint, step=10).to_bytes()
    for step, content in enumerate([None, b"", b"\xff\x00garbage", b"{}", stale, nothing, ahead], start=3):
        if content is None:
            world.store.delete([world.keys.latest])
        else:
            world.store.put(world.keys.latest, content)
        fenced = attempt(world)
        assert picked(fenced) == newest.checkpoint, content
        newest = commit(world, 10 * step)
        hint = Latest.model_validate_json(world.store.get(world.keys.latest))
        assert hint.checkpoint_id == newest.checkpoint, "put right by the next commit"
    check_every_byte(world)

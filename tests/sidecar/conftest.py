"""Fixtures of the sidecar's tests. The folder is put on the path, as tests are no packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sidecar_world import World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes runs of (nodes, ranks per node); all processes end with the test."""
    made: list[World] = []

    def make(nodes: int = 1, ranks_per_node: int = 4) -> World:
        made.append(World(tmp_path / f"world-{len(made)}", nodes, ranks_per_node))
        return made[-1]

    yield make
    for world in made:
        world.close()

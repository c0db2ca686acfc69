"""One cluster, one installation of the chart and one build of the images for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from hack.cluster_world import World  # noqa: E402

WORLDS: list[World] = []


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The local cluster with the operator installed by helm for the tests' namespace."""
    world = World(tmp_path_factory.mktemp("ledgers"))
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    world.up()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: world.cluster.variables[name] for name in names})
    WORLDS.append(world)
    yield world
    WORLDS.remove(world)
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    world.down()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure here is explained by what stands in the cluster at that moment."""
    report = yield
    if report.failed and WORLDS:
        report.sections.append(("what stands in the cluster", WORLDS[0].diagnosis()))
    return report

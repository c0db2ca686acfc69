"""How tests are shared out when several processes run them (`-n 2`).

There is one cluster on a machine: all files with tests on it stay in one process, one after the other. They wait most
of the time, so that what the others do meanwhile halves the time of the whole. Any other file stays in one process too,
since its fixtures run torch.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]


class ByCluster(LoadScopeScheduling):
    """One unit of work for the cluster, one for each other file."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.split("::", 1)[0])


@cache
def unit_of(path: str) -> str:
    """The unit of a test file, by its path below the checkout."""
    on_cluster = re.search(
        r"^pytestmark\b.*\bmark\.cluster\b|^\s*@pytest\.mark\.cluster\b", _text(path), re.MULTILINE
    )
    return "cluster" if on_cluster else path


def _text(path: str) -> str:
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ByCluster(config, log)

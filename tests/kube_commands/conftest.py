"""`rtj` called as a user does, against an API server on loopback and stores of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "store"), str(TESTS / "docs")]

from api_server import ApiServer  # noqa: E402
from cluster_desk import Desk  # noqa: E402


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def desk(server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(server, server.kubeconfig(tmp_path), capsys.readouterr)

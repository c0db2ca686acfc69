"""`rtj` called as a user does, against an API server on loopback and stores of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "store")]

from api_server import ApiServer  # noqa: E402

from trainer_sidecar import cli  # noqa: E402


@dataclass
class Desk:
    """A user with a kubeconfig."""

    server: ApiServer
    kubeconfig: Path
    capture: Callable[[], Any]
    said: str = ""
    checkpoints: list[str] = field(default_factory=list)

    def rtj(self, *words: str, code: int = 0) -> str:
        """stdout of `rtj <words>`; the exit code must be `code`. stderr is in `said`."""
        found = cli.main([*words, "--kubeconfig", str(self.kubeconfig)])
        out, self.said = self.capture()
        assert found == code, (found, out, self.said)
        return str(out)

    def json(self, *words: str) -> Any:
        return json.loads(self.rtj(*words, "-o", "json"))


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def desk(server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(server, server.kubeconfig(tmp_path), capsys.readouterr)

"""A user with a kubeconfig, who calls `rtj`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api_server import ApiServer

from trainer_sidecar import cli


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

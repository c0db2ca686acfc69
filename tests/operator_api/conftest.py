"""Jobs that the tests of this folder start from, read from the YAML files in `jobs/`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture
def raw_job() -> Callable[[str], dict[str, Any]]:
    """A fresh copy of `jobs/<name>.yaml` as the API server would send it."""

    def load(name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load((HERE / "jobs" / f"{name}.yaml").read_text(encoding="utf-8"))
        return loaded

    return load

"""One helm for all tests of this folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import chart


@pytest.fixture(scope="session")
def helm() -> str:
    return chart.helm()

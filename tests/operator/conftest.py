"""Makes the value builders beside the tests importable (importlib mode puts no test folder on the path).

Also the fixtures of the tests that run the operator as a process against the local cluster.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from operator_world import Place, nobody_else, prepare


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    found = prepare()
    with nobody_else(found):
        yield found


@pytest.fixture
def place(env: dict[str, str], tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path, env) as found:
        yield found

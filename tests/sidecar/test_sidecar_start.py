"""What a process imports before it does its work: a pod's start, and every command of a person, waits for that."""

import subprocess
import sys
import threading

import pytest

from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.store.base import Store, UnavailableError
from trainer_sidecar.store.memory import MemoryStore

HEAVY = {
    "torch",
    "numpy",
    "boto3",
    "botocore",
    "s3transfer",
    "urllib3",
    "kubernetes",
    "kopf",
    "aiohttp",
    "requests",
}


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param("trainer_sidecar.sidecar.main, trainer_sidecar.sidecar.sidecar", id="sidecar"),
        pytest.param("trainer_sidecar.cli", id="rtj"),
    ],
)
def test_a_start_imports_no_client_of_a_store_or_cluster_and_no_torch(modules: str) -> None:
    """Not one that an imported module could do without: the S3 client alone costs as much as all of the sidecar."""
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY & set(loaded.stdout.split()) == set()


def test_the_store_is_opened_once_while_nobody_waits_for_it() -> None:
    opened, begun = [], threading.Event()

    def open_store() -> Store:
        begun.set()
        opened.append(MemoryStore())
        return opened[-1]

    run = Run(RunKeys("ml", "a"), open_store, writer="test")
    run.open_ahead()
    assert begun.wait(30)
    assert run.store() is opened[0]
    assert len(opened) == 1


def test_a_store_that_cannot_be_opened_ahead_is_opened_when_it_is_used() -> None:
    answers: list[Store | Exception] = [UnavailableError("away", store="memory://a"), MemoryStore()]
    refused = threading.Event()

    def open_store() -> Store:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            refused.set()
            raise answer
        return answer

    run = Run(RunKeys("ml", "a"), open_store, writer="test")
    run.open_ahead()
    assert refused.wait(30)
    assert isinstance(run.store(), MemoryStore)

"""What a process imports before it does its work: a pod's start, and every command of a person, waits for that."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sidecar_world import ROOT, eventually, free_port

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


def test_a_termination_that_comes_while_python_starts_is_not_lost(tmp_path: Path) -> None:
    """The first process of a container gets no signal that it does not handle yet: by the image's own entry point, in a
    pid namespace of its own, the sidecar comes up, takes the signal and ends."""
    text = (ROOT / "Dockerfile").read_text()
    (entry,) = re.findall(r'^ENTRYPOINT (\[.*"trainer_sidecar.sidecar"\])$', text, re.MULTILINE)
    words = [sys.executable if word == "python3" else word for word in json.loads(entry)]
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    (tmp_path / "volume").mkdir()
    told = [
        f"--volume={tmp_path}/volume",
        f"--plan-file={tmp_path}/plan.json",
        "--pod-index=0",
        "--status-host=127.0.0.1",
    ]
    told += [
        f"--status-port={free_port()}",
        "--namespace=team",
        "--run-id=job",
        f"--store-url=file://{tmp_path}/store",
    ]
    with subprocess.Popen(
        ["unshare", *rights, "--pid", "--fork", "--kill-child", "--mount-proc", *words, *told],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as outer:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        try:
            eventually(lambda: _is_python(children.read_text().split()), "the first process is Python")
            os.kill(int(children.read_text().split()[0]), signal.SIGTERM)
            _, log = outer.communicate(timeout=60)
        finally:
            outer.kill()
    assert outer.returncode == 0, log
    assert "sidecar up" in log
    assert "sidecar down" in log


def _is_python(pids: list[str]) -> bool:
    return bool(pids) and Path(f"/proc/{pids[0]}/comm").read_text().startswith("python")

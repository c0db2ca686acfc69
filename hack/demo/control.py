"""The control run: the same script, data and batch on this machine, without Kubernetes and without a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hack.demo.proofs import Evidence, collect
from hack.demo.settings import EXAMPLE, JOB, ROOT, DemoError, Settings
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.open import open_store

NAMESPACE = "local"
"""What `rtj run` puts its runs under."""
DEADLINE_SECONDS = 600


def command(settings: Settings) -> list[str]:
    """The command line; mesh and batch come from the job that the cluster gets, too."""
    return [
        str(ROOT / ".venv/bin/rtj"), "run", "-f", str(EXAMPLE / "job.yaml"), "--nproc", "4",
        "--store", (settings.control / "store").as_uri(), "--run-id", JOB,
        "--interval-steps", str(settings.interval_steps), "--ledger", str(settings.control / "ledger"),
        "--", str(EXAMPLE / "train.py"), "--steps", str(settings.steps),
    ]  # fmt: skip


def train(settings: Settings) -> Evidence:
    """Run it to its end. Raises DemoError with the end of its log."""
    settings.control.mkdir(parents=True, exist_ok=True)
    log = settings.control / "log.txt"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command(settings), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                check=False, timeout=DEADLINE_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DemoError(
                f"the control run did not end within {DEADLINE_SECONDS} s; its log is {log}"
            ) from error
    if done.returncode != 0:
        tail = log.read_text(errors="replace")[-3000:]
        raise DemoError(f"the control run ended with exit code {done.returncode}; its log is {log}:\n{tail}")
    store = open_store((settings.control / "store").as_uri())
    try:
        return collect(store, RunKeys(NAMESPACE, JOB), settings.control / "ledger")
    finally:
        store.close()

"""Runs of `rtj run` around `trainer.py`, and the proof that what they measured has happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import NothingHappenedError

from datapath.raw import Bucket
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.run.local_plan import NAMESPACE
from trainer_sidecar.run.local_volume import memory_folder
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

SCRIPT = Path(__file__).with_name("trainer.py")
JOB = Path(__file__).with_name("job.yaml")
Fact = dict[str, Any]


@dataclass
class TrainingRun:
    """One run id: trained, saved and resumed as often as `act` is called."""

    store: Bucket
    run_id: str
    bytes: int
    """Of the parameters that train."""
    tensors: int
    server: int = 0
    """Process of the S3 server."""
    frozen: int = 0
    optimizer: str = "SGD"
    ranks: int = 1
    tp: int = 1
    sharded: bool = False
    """FSDP2 (and columns over `tp`) instead of copies on each rank."""
    facts: list[Fact] = field(default_factory=list)

    def act(self, *acts: str, **task: Any) -> list[Fact]:
        """What the ranks wrote down. Raises NothingHappenedError when a save of theirs is in no journal."""
        defaults = {"rounds": 5, "dcp": False, "idle": 200, "step_seconds": 0.3, "round": 0}
        known = {"acts": acts, "tensors": self.tensors, "bytes": self.bytes, "frozen": self.frozen}
        known |= {
            "sharded": self.sharded,
            "optimizer": self.optimizer,
            "server": self.server,
            "store": self.store.document(),
        }
        with tempfile.TemporaryDirectory(prefix="rtj-bench-", dir=memory_folder()) as folder:
            known |= {"out": f"{folder}/facts", "scratch": folder}
            self._run(json.dumps({**defaults, **known, **task}))
            found = [json.loads(line) for line in Path(folder, "facts").read_text().splitlines()]
        self._prove(found)
        self.facts += found
        return found

    def _run(self, task: str) -> None:
        command = [sys.executable, "-m", "trainer_sidecar.cli", "run", "--store", self.store.url]
        command += ["--endpoint", self.store.endpoint, "--run-id", self.run_id, "--nproc", str(self.ranks)]
        if self.sharded:
            command += ["-f", str(JOB), "--tp", str(self.tp)]
        command += ["--interval-steps", "0", "--interval-seconds", "0", "--max-restarts", "0", "--again"]
        environment = {**os.environ, **self.store.environment, "OMP_NUM_THREADS": "1", "BENCH": task}
        done = subprocess.run(
            [*command, "--", str(SCRIPT)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.run_id}: rtj run ended with {done.returncode}: {done.stderr[-3000:]}")

    def committed_bytes(self) -> dict[str, int]:
        """Bytes of each checkpoint, as the journal says."""
        keys = RunKeys(NAMESPACE, self.run_id)
        given = self.store.environment
        store = open_store(
            self.store.url, endpoint=self.store.endpoint, region=given["AWS_REGION"], credentials=given
        )
        try:
            return {name: m.bytes for name, m in Journal(store, keys).read().manifests.items()}
        finally:
            store.close()

    def _prove(self, facts: list[Fact]) -> None:
        named = {f["checkpoint"]: f["bytes"] for f in facts if "checkpoint" in f}
        committed = self.committed_bytes() if named else {}
        for checkpoint, size in named.items():
            if committed.get(checkpoint, 0) < size:
                raise NothingHappenedError(
                    f"{self.run_id}: a save of {size} bytes was timed, the journal has "
                    f"{committed.get(checkpoint, 'no commit')} of {checkpoint}"
                )


def column(facts: list[Fact], kind: str, name: str, *, warm: bool = True) -> list[float]:
    """Values of `name` in facts of one kind, without the first round when `warm`."""
    return [f[name] for f in facts if f["kind"] == kind and (not warm or f["round"] > 0)]

"""A run on this machine: a real sidecar over a `file://` store, and real ranks that a test starts attempt by attempt.

Unlike `rtj run`, a test says itself which commit an attempt starts from and on how many ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_sidecar.contract.journal import Attempt, Cause, Entry, Manifest, Owner, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.outcome import Outcome
from trainer_sidecar.contract.plan import CheckpointPolicy, Endpoint, Plan, VerificationPolicy
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
OWNER = Owner(namespace="team", name="job", uid="uid-1")
KEYS = RunKeys("team", "job")


def eventually(check: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value of `check`, polled until a deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := check():
            return value
        time.sleep(0.05)
    raise AssertionError(f"after {seconds} s still not: {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def topology(ranks: int, batch: int, micro: int = 3, tp: int = 1, pp: int = 1) -> Topology:
    """One node of `ranks` ranks; micro batches of at most `micro` samples."""
    dp = ranks // tp // pp
    share = batch // dp
    size = max(s for s in range(1, micro + 1) if share % s == 0)
    return Topology(
        nodes=1,
        ranks_per_node=ranks,
        mesh=Mesh(dp=dp, tp=tp, pp=pp),
        batch=Batch(global_batch_size=batch, micro_batch_size=size, accumulation=share // size),
    )


class Started:
    """Ranks of one attempt."""

    def __init__(self, world: RankWorld, plan: Plan, process: subprocess.Popen[bytes], log: Path) -> None:
        self.world, self.plan, self.process, self._log = world, plan, process, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, code: int = 0, seconds: float = 240.0) -> Started:
        """Wait for the ranks' end and expect an exit code."""
        found = self.process.wait(seconds)
        assert found == code, f"ranks ended with {found}:\n{self.log[-6000:]}"
        return self

    def order_save_and_exit(self) -> None:
        path = self.world.volume.order(self.plan.epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("SaveAndExit")

    def outcome(self, rank: int = 0) -> Outcome:
        path = self.world.volume.outcome_dir(self.plan.epoch) / f"rank-{rank:05d}.json"
        return Outcome.model_validate_json(path.read_bytes())

    def result(self, rank: int = 0) -> dict[str, Any]:
        """What `tiny.py` wrote down."""
        path = self.world.out / f"e{self.plan.epoch}-r{rank}.json"
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def ledger(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for path in sorted(self.world.ledger.glob(f"job-e{self.plan.epoch}-r*.jsonl")):
            lines += [json.loads(line) for line in path.read_text().splitlines()]
        return lines


class RankWorld:
    """Store, volume and sidecar of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out, self.ledger = root / "out", root / "ledger"
        self.volume = Volume(root / "volume")
        for folder in (root / "store", self.volume.root):
            folder.mkdir(parents=True)
        self.store = FileStore(root / "store")
        self.journal = Journal(self.store, KEYS)
        self.plan_file, self.port = root / "plan.json", free_port()
        self.sidecar: subprocess.Popen[bytes] | None = None
        self._started: list[Started] = []

    def start_sidecar(self) -> None:
        self.sidecar = subprocess.Popen(
            [
                *(sys.executable, "-m", "trainer_sidecar.sidecar", "--status-host=127.0.0.1"),
                *(f"--volume={self.volume.root}", f"--plan-file={self.plan_file}", "--pod-index=0"),
                *(f"--status-port={self.port}", "--namespace=team", "--run-id=job"),
                f"--store-url=file://{self.root / 'store'}",
            ],
            cwd=ROOT,
            stderr=(self.root / "sidecar.log").open("ab"),
        )
        eventually(self._reachable, "sidecar up")

    def _reachable(self) -> bool:
        assert self.sidecar is not None
        assert self.sidecar.poll() is None, (self.root / "sidecar.log").read_text()
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=2).status == 200
        except OSError:
            return False

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status", timeout=5) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    def commits(self) -> list[Manifest]:
        return [e for e in self.journal.refresh().entries if isinstance(e, Manifest)]

    def commit_of(self, step: int) -> RestorePoint:
        """The newest commit of a step as a restore point."""
        entry = next(c for c in reversed(self.commits()) if c.step == step)
        return RestorePoint(
            checkpoint_id=entry.checkpoint_id, sequence=entry.seq, step=step, manifest=entry.manifest
        )

    def attempt(
        self,
        where: Topology,
        restore: RestorePoint | None = None,
        checkpoint: CheckpointPolicy | None = None,
        verification: VerificationPolicy | None = None,
        publish: bool = True,
    ) -> Plan:
        """Fence: append an `Attempt` and publish its plan to the sidecar, unless this one shall not hear of it."""
        nonce = secrets.token_hex(8)

        def decide(history: History) -> Entry:
            numbers = [e.attempt for e in history.entries if isinstance(e, Attempt)]
            return Attempt(
                seq=history.next_seq,
                epoch=history.next_seq,
                owner=OWNER,
                writer="test",
                nonce=nonce,
                time=time.time(),
                attempt=len(numbers) + 1,
                cause=Cause.RESUMED if restore else Cause.FIRST,
                topology=where,
                restore=restore,
            )

        entry = self.journal.append(decide, timeout=30)
        assert isinstance(entry, Attempt)
        plan = Plan(
            namespace="team",
            run_id="job",
            owner=OWNER,
            attempt=entry.attempt,
            epoch=entry.seq,
            nonce=nonce,
            cause=entry.cause,
            topology=where,
            master=Endpoint(address="127.0.0.1", port=free_port()),
            coordinator=Endpoint(address="127.0.0.1", port=self.port),
            restore=restore,
            checkpoint=checkpoint or CheckpointPolicy(interval_steps=4, interval_seconds=0),
            verification=verification or VerificationPolicy(),
        )
        frozen = self.volume.plan(plan.epoch)
        frozen.parent.mkdir(parents=True, exist_ok=True)
        frozen.write_bytes(plan.to_bytes())
        if not publish:
            return plan
        self.tell(plan)
        if self.sidecar is None:
            self.start_sidecar()
        eventually(lambda: self.status()["epoch"] == plan.epoch, "the sidecar sees the plan")
        return plan

    def tell(self, plan: Plan) -> None:
        """Write the plan for the sidecar to see; ranks keep their frozen copy."""
        temporary = self.plan_file.with_suffix(".new")
        temporary.write_bytes(plan.to_bytes())
        temporary.replace(self.plan_file)

    def start(self, plan: Plan, script: str = "tiny.py", *, torchrun: bool = False, **env: str) -> Started:
        """Start the ranks of a plan, by torchrun or forked from one process."""
        ranks, path = plan.topology.mesh.world_size, str(SCRIPTS / script)
        command = [sys.executable, str(SCRIPTS / "forked.py"), str(ranks), path]
        if torchrun:
            command = [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--nnodes=1"),
                *("--master-addr=127.0.0.1", f"--master-port={plan.master.port}", "--max-restarts=0", path),
            ]
        log = self.root / f"ranks-{plan.epoch}.log"
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                **self.environment(plan),
                **env,
            },
        )
        self._started.append(Started(self, plan, process, log))
        return self._started[-1]

    def environment(self, plan: Plan) -> dict[str, str]:
        """What the ranks of a plan are told, but for their seat."""
        return {
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(plan.master.port), "TINY_OUT": str(self.out)},
            **{"RTJ_VOLUME": str(self.volume.root), "RTJ_PLAN": str(self.volume.plan(plan.epoch))},
            **{"RTJ_SOCKET": str(self.volume.socket), "RTJ_LEDGER_DIR": str(self.ledger)},
        }

    def close(self) -> None:
        for started in self._started:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait()
        if self.sidecar is not None:
            self.sidecar.kill()
            self.sidecar.wait()

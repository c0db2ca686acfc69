"""The warm parent of many attempts, as tests see it: torch is imported once, an attempt costs a fork."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from rank_world import ROOT, SCRIPTS, RankWorld

from trainer_sidecar.contract.plan import Plan


class WarmRanks:
    """Runs one attempt at a time, to its end."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "warm.log"
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "warm.py")],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def run(
        self, world: RankWorld, plan: Plan, script: str, *, imports: tuple[str, ...] = (), **env: str
    ) -> list[int]:
        """Exit codes by rank; negative for a signal. The ranks' output lies in `log_of(world, plan)`."""
        request = {
            "ranks": plan.topology.mesh.world_size,
            "script": str(SCRIPTS / script),
            "env": {**world.environment(plan), **env},
            "log": str(log_of(world, plan)),
            "imports": imports,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], 240)
        assert ready, f"an attempt of epoch {plan.epoch} hangs:\n{tail(world, plan)}"
        line = self._process.stdout.readline()
        assert line, f"the warm parent ended: {self._log.read_text()[-4000:]}"
        codes: list[int] = json.loads(line)
        return codes

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def log_of(world: RankWorld, plan: Plan) -> Path:
    return world.root / f"ranks-{plan.epoch}.log"


def tail(world: RankWorld, plan: Plan) -> str:
    path = log_of(world, plan)
    return path.read_text(errors="replace")[-6000:] if path.exists() else "(no output)"

"""Attempts of one run with a framework's script, forked from a parent that has imported the framework once."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rank_world import KEYS, ROOT, RankWorld, topology
from warm_ranks import WarmRanks, tail

from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.journal import Manifest, RestorePoint
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, Plan, WhenBusy
from trainer_sidecar.store.verify import read_manifest

SCRIPTS = Path(__file__).parent / "scripts"
BATCH = 8
POLICY = CheckpointPolicy(interval_steps=2, interval_seconds=0, when_busy=WhenBusy.WAIT)
ALONE, PAIR = topology(1, BATCH, micro=4), topology(2, BATCH, micro=2)
"""Two micro batches per step, on one rank and on two."""


def samples(page: str, language: str) -> list[str]:
    """Code of a page in docs/, block by block."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


class Lab:
    """One store, one sidecar, one parent."""

    imports: tuple[str, ...] = (
        *("peft", "torchdata.stateful_dataloader", "transformers.models.llama.modeling_llama"),
        *(name for name in ("deepspeed",) if find_spec(name)),  # Accelerate imports it where it is installed
        "trainer_sidecar.integrations.transformers",
    )
    """What the parent imports before it forks; a rank would take a second for it."""

    def __init__(self, root: Path) -> None:
        self.world, self.warm = RankWorld(root / "run"), WarmRanks(root)
        self.world.out.mkdir()

    def attempt(self, where: Any, restore: RestorePoint | None = None) -> Plan:
        return self.world.attempt(where, restore, checkpoint=POLICY)

    def run(self, plan: Plan, script: str, **env: str) -> list[int]:
        return self.warm.run(self.world, plan, str(SCRIPTS / script), imports=self.imports, **env)

    def finished(self, plan: Plan, script: str, **env: str) -> list[dict[str, Any]]:
        """What the ranks wrote down; all ended well."""
        codes = self.run(plan, script, **env)
        assert set(codes) == {0}, f"{codes}:\n{tail(self.world, plan)}"
        name = script.partition("_")[0]
        paths = [self.world.out / f"{name}-e{plan.epoch}-r{r}.json" for r in range(len(codes))]
        return [json.loads(path.read_text()) for path in paths]

    def log(self, plan: Plan) -> str:
        return tail(self.world, plan)

    def outcome(self, plan: Plan) -> OutcomeKind:
        path = self.world.volume.outcome_dir(plan.epoch) / "rank-00000.json"
        return Outcome.model_validate_json(path.read_bytes()).kind

    def commits(self, plan: Plan) -> list[Manifest]:
        return [c for c in self.world.commits() if c.epoch == plan.epoch]

    def point(self, commit: Manifest) -> RestorePoint:
        return self.world.journal.refresh().restore_point_of(commit.checkpoint_id)

    def manifest(self, commit: Manifest) -> ManifestFile:
        return read_manifest(self.world.store, KEYS, self.point(commit))

    def samples(self, plan: Plan) -> dict[int, list[int]]:
        """Consumed by step, over all ranks, sorted."""
        found: dict[int, list[int]] = {}
        for path in sorted(self.world.ledger.glob(f"job-e{plan.epoch}-r*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                if line["kind"] == "step":
                    found[line["step"]] = sorted(found.get(line["step"], []) + line["samples"])
        return found

    def close(self) -> None:
        self.world.close()
        self.warm.close()

"""Random state of one rank: Python, NumPy, torch on the CPU and on the rank's CUDA device.

Belongs to the rank alone and is saved under its own key (field finding: one rank's state restored on all). When the
topology changed, every rank gets a state derived from (seed, step, dp rank), whether it existed before or not: what was
random for one rank's share of the batch says nothing about another share. The report names each of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer_sidecar.contract.report import Check
from trainer_sidecar.train import tagged

log = logging.getLogger("rtj.train")
_FIRST_BATCH = "rng at the first batch"


def capture(device: torch.device) -> dict[str, Any]:
    """Tagged JSON of this process's generators."""
    version, words, gauss = random.getstate()
    name, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, np.array(words, dtype=np.uint32), gauss],
        "numpy": [name, np.asarray(keys, dtype=np.uint32), int(pos), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    encoded: dict[str, Any] = tagged.encode(state, "rng")
    return encoded


def restore(encoded: Any, device: torch.device) -> None:
    """Put back what `capture` returned. Restore it last: whatever draws afterwards would shift it."""
    state = tagged.decode(encoded)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(w) for w in words), gauss))
    name, keys, pos, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys, pos, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def digest(encoded: Any) -> str:
    """SHA-256 over the JSON of what `capture` returned, 64 hex digits."""
    return hashlib.sha256(json.dumps(encoded, sort_keys=True).encode()).hexdigest()


@dataclass
class Kept:
    """The generators as the restore left them, until the first batch.

    What a script does in between (`set_seed`, `iter(DataLoader)`, a sanity check that draws) moves them unseen, and the
    resumed run would differ from the uninterrupted one.
    """

    state: dict[str, Any]
    device: torch.device

    @staticmethod
    def now(device: torch.device) -> Kept:
        return Kept(capture(device), device)

    def check(self) -> Check:
        """At the first batch: put the generators back if they have moved, and prove by digest that they stand there."""
        moved = self.put_back()
        if moved:
            log.warning("the script drew from or seeded %s after the restore: put back", ", ".join(moved))
        detail = f"moved by the script after the restore and put back: {', '.join(moved)}" if moved else ""
        expected, found = digest(self.state), digest(capture(self.device))
        return Check(
            name=_FIRST_BATCH, passed=expected == found, expected=expected, found=found, detail=detail
        )

    def unseen(self) -> Check:
        """For a script that feeds itself."""
        detail = (
            "not checked: the script feeds itself, so nothing tells what was drawn before its first batch"
        )
        return Check(name=_FIRST_BATCH, passed=True, expected=digest(self.state), detail=detail)

    def put_back(self) -> list[str]:
        """Restore again if need be; returns the names of the generators that had moved."""
        found = capture(self.device)
        moved = [name for name in self.state if found.get(name) != self.state[name]]
        if moved:
            restore(self.state, self.device)
        return moved


def derive(seed: int, step: int, dp_rank: int, device: torch.device) -> None:
    """Seed all generators from SHA-256("rtj-rng-1", seed, step, dp rank): the rule for ranks of a new topology."""
    digest = hashlib.sha256(f"rtj-rng-1\n{seed}\n{step}\n{dp_rank}".encode()).digest()
    value = int.from_bytes(digest[:8], "little") >> 1
    random.seed(value)
    np.random.seed(np.frombuffer(digest, dtype="<u4"))
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value)

"""What fault drills train, delivered to the pods by a ConfigMap: a small fully sharded network that tells every step.

Each rank prints what its ledger says of a step, so that whoever reads the logs can count samples and compare losses.
Files in DRILL_WISHES, which only somebody inside the container can make, ask for what no fault from outside can time.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from trainer_sidecar.train import Session

SAMPLES = 1 << 16
MARK = "rtj-drill "
WISHES = Path(os.environ.get("DRILL_WISHES", "/dev/shm/rtj-drill"))
SECONDS = float(os.environ.get("DRILL_MICRO_SECONDS", "0.1"))


class Sums:
    """Samples of 8 numbers; the target is a function of them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x, x.sin().sum(dim=0, keepdim=True)


class Teller:
    """Prints new lines of this rank's ledger."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._pattern, self._folder = f"*-r{rank}.jsonl", folder
        self._seen = {path: path.stat().st_size for path in folder.glob(self._pattern)}

    def tell(self) -> None:
        for path in self._folder.glob(self._pattern):
            with path.open("rb") as source:
                source.seek(self._seen.get(path, 0))
                text = source.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._seen[path] = self._seen.get(path, 0) + len(whole)
            for line in whole.decode().splitlines():
                # One write a line: the ranks of a pod share its output, and print() writes the line's end apart.
                os.write(sys.stdout.fileno(), f"{MARK}{line}\n".encode())


def wished(name: str) -> bool:
    """Whether somebody asked for it."""
    return (WISHES / name).exists()


def use_up_memory() -> None:
    """Until the kernel ends it."""
    hoard = []
    while True:
        hoard.append(torch.ones(4 << 20))


def main() -> None:
    """Train until told to stop."""
    mesh = Session.mesh_from_env()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model.to(mesh.device_type)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=100)
    ledger = Path(os.environ["RTJ_LEDGER_DIR"])
    ledger.mkdir(parents=True, exist_ok=True)
    teller = Teller(ledger, int(os.environ["RANK"]))
    # What ranks of this pod before these were asked for is done.
    done = {name for name in ("memory", "save") if wished(name)}
    with Session.from_env(
        model=model, optimizer=optimizer, scheduler=scheduler, data=Sums(), total_steps=1_000_000, seed=0
    ) as session:
        for x, y in session.batches():
            if "memory" not in done and wished("memory"):
                use_up_memory()
            if "save" not in done and session.micro == 1 and wished("save"):
                done.add("save")
                session.request_save()
            x, y = x.to(mesh.device_type), y.to(mesh.device_type)
            loss = nn.functional.mse_loss(model(x), y) / session.accumulation
            loss.backward()
            time.sleep(SECONDS)
            if session.micro_end(loss):
                continue
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.step_end(grad_norm=norm)
            teller.tell()


if __name__ == "__main__":
    main()

"""DDP with BatchNorm, whose buffers differ between ranks by design; from `DRIFT_AT` on, a weight of rank 1 does too.

With `DRIFT_AT`, an extra object differs at step 1 only. With `DRIFT_ALONE`, rank 1 has a buffer more.

Every rank writes `<TINY_OUT>/drift-e<epoch>-r<rank>.jsonl`: step, loss, digest of its buffers at the end of the step.
"""

import json
import os
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.train import Session, environment

DRIFT_AT = int(os.environ.get("DRIFT_AT", "0"))
STEPS = int(os.environ.get("DRIFT_STEPS", "12"))


class Data:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.sin(torch.arange(4) * (i + 1.0))
        return x, x.sum().reshape(1)


class Tracker:
    def __init__(self):
        self.best = OrderedDict()

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        assert type(state["best"]) is OrderedDict
        self.best = state["best"]


def main() -> None:
    Session.mesh_from_env("cpu")
    env = environment.join()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    if os.environ.get("DRIFT_ALONE") and env.rank == 1:
        inner.register_buffer("alone", torch.ones(4))
    model = DistributedDataParallel(inner, broadcast_buffers="DRIFT_ALONE" not in os.environ)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    tracker, options = Tracker(), {"total_steps": STEPS, "seed": 1}
    folder = Path(os.environ["TINY_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    with (
        open(folder / f"drift-e{env.plan.epoch}-r{env.rank}.jsonl", "w", buffering=1) as out,
        Session.from_env(
            model=model, optimizer=optimizer, data=Data(), extra={"tracker": tracker}, **options
        ) as s,
    ):
        for x, y in s.batches():
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.best["step"], tracker.best["of"] = s.step + 1, env.rank if DRIFT_AT and s.step == 0 else 0
            if s.step + 1 == DRIFT_AT and env.rank == 1:
                with torch.no_grad():
                    inner[0].weight[0, 0] += 1e-6
            print(
                json.dumps({"step": s.step + 1, "loss": loss.item(), "mean": inner[1].running_mean.tolist()}),
                file=out,
            )
            s.step_end(loss)


main()

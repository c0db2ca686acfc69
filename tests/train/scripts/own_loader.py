"""Two ranks with torchdata's loader: an evaluation of unlike lengths after step 2, and an endless one after step 3, in
which rank 1 finds the order to save and exit.
"""

import itertools
import json
import os
from pathlib import Path

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer_sidecar.train import Session, StatefulLoader, environment


def main() -> None:
    torch.set_num_threads(1)
    Session.mesh_from_env("cpu")
    env = environment.join()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = StatefulLoader(
        lambda dp_rank, dp, micro: StatefulDataLoader(
            range(dp_rank, 40, dp), micro, generator=torch.Generator().manual_seed(1), shuffle=True
        ),
        ids=lambda batch: batch.tolist(),
    )
    out = {"evaluated": [], "kept": True}
    with Session.from_env(model=model, optimizer=optimizer, data=data, total_steps=100) as s:
        for batch in s.batches():
            loss = model(batch[:, None] / 40).square().mean() / s.accumulation
            loss.backward()
            if s.micro_end(loss):
                continue
            optimizer.step()
            optimizer.zero_grad()
            s.step_end()
            before = torch.get_rng_state()
            if s.step == 2:
                out["evaluated"].append([int(i) for i in s.aside(range(3 + 4 * env.rank))])
            if s.step == 3:
                seen = 0
                for i in s.aside(itertools.count()):
                    seen += 1
                    torch.rand(2)
                    if env.rank == 1 and i == 5:
                        env.order_file.parent.mkdir(parents=True, exist_ok=True)
                        env.order_file.write_text("SaveAndExit")
                out["evaluated"].append(seen)
            out["kept"] = out["kept"] and torch.equal(before, torch.get_rng_state())
        out["step"] = s.step
    folder = Path(os.environ["TINY_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(out))


main()

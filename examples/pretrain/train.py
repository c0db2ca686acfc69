"""Pretrains a byte-level transformer with FSDP2 over Python's own sources, and resumes wherever it was stopped.

Everything is plain PyTorch but the lines marked `# rtj`. Start it with `rtj run`, or as a ResumableTrainingJob.
"""

import argparse

import torch
from corpus import StandardLibrary
from model import ByteTransformer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from trainer_sidecar.train import Session  # rtj


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=128, help="bytes per sample")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps until it is reached")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    mesh = Session.mesh_from_env()  # rtj: as many ranks as there are this time
    device = mesh.device_type
    torch.manual_seed(args.seed)
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device == "cuda" else MixedPrecisionPolicy()
    )
    model = ByteTransformer(args.width, args.layers, context=args.context).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = LinearLR(optimizer, start_factor=0.05, total_iters=args.warmup)
    cosine = CosineAnnealingLR(optimizer, T_max=args.steps - args.warmup, eta_min=args.lr / 10)
    scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[args.warmup])

    with Session.from_env(  # rtj: restores all of these, if there is something to restore
        model=model, optimizer=optimizer, scheduler=scheduler,  # rtj
        data=StandardLibrary(args.context), total_steps=args.steps, seed=args.seed,  # rtj
    ) as session:  # rtj  # fmt: skip
        for batch in session.batches():  # rtj: each sample once, whatever the number of ranks
            tokens = batch.to(device)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss = loss / session.accumulation  # rtj: fewer ranks, more micro batches, same global batch
            loss.backward()
            if session.micro_end(loss):  # rtj
                continue  # rtj
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.step_end(grad_norm=norm)  # rtj: saves when it is time to


if __name__ == "__main__":
    main()

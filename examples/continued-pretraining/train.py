"""Trains a model of Hugging Face's on, with FSDP2, from weights that `rtj import` has put into the store.

The model is made without memory, sharded, and filled from the store: no rank ever holds all of it. Start it with
`rtj run --resume-from base`, or as a ResumableTrainingJob with `resumeFrom`.
"""

import argparse
import math

import torch
from corpus import Windows
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer_sidecar.train import Session, fingerprint  # rtj


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", default="base", help="folder with config and tokenizer")
    parser.add_argument("--data", default="python", help="a text file")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--context", type=int, default=128, help="tokens per sample")
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps until it is reached")
    return parser.parse_args()


def sharded(base: str, mesh, device: str) -> nn.Module:
    """The model of a folder's config, its parameters sharded over the mesh, with nothing in them yet but noise."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float32)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device == "cuda" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half)
    model.to_empty(device=device)
    model.init_weights()  # what no checkpoint holds as well: the frequencies of the positions
    return model


def main() -> None:
    args = parse()
    mesh = Session.mesh_from_env()  # rtj: as many ranks as there are this time
    torch.manual_seed(0)
    model, tokenizer = sharded(args.base, mesh, mesh.device_type), AutoTokenizer.from_pretrained(args.base)
    optimizer = AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda n: rate(n, args.warmup, args.steps))

    with Session.from_env(  # rtj: the imported weights at first, everything at each resume
        model=model, optimizer=optimizer, scheduler=scheduler,  # rtj
        data=Windows(args.data, tokenizer, args.context), total_steps=args.steps,  # rtj
        fingerprints=fingerprint(model_config=model.config, tokenizer=tokenizer),  # rtj
    ) as session:  # rtj  # fmt: skip
        if session.resume is None:  # rtj: neither the import nor a commit, so the model is noise
            raise ValueError(
                f"nothing was restored, so the weights of {args.base} are not in the model: start with "
                "`rtj run --resume-from RUN_ID`, or give the job spec.checkpoint.resumeFrom (README.md)"
            )
        for batch in session.batches():  # rtj: each sample once, whatever the number of ranks
            tokens = batch.to(mesh.device_type)
            loss = model(input_ids=tokens, labels=tokens).loss / session.accumulation  # rtj
            loss.backward()
            if session.micro_end(loss):  # rtj
                continue  # rtj
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.step_end(grad_norm=norm)  # rtj: saves when it is time to


def rate(step: int, warmup: int, steps: int) -> float:
    """Share of the peak rate: linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


if __name__ == "__main__":
    main()

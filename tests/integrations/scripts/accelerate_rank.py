"""A loop with Accelerate. Every rank writes `<TINY_OUT>/accelerate-e<epoch>-r<rank>.json`."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from trainer_sidecar.integrations.accelerate import prepared, reduced_last
from trainer_sidecar.train import Session, environment

sys.path.insert(0, str(Path(__file__).parent))
from tiny_language import Rows, collate, model


def main():
    Session.mesh_from_env("cpu")
    accelerator, made = Accelerator(cpu=True), model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    made, optimizer = accelerator.prepare(made, optimizer)
    losses = {}
    with Session.from_env(
        **prepared(accelerator, made, optimizer, scheduler),
        data=Rows(20, lengths=1),  # the mean of means is the mean
        collate=collate,
        total_steps=6,
    ) as session:
        for batch in session.batches(session.loader()):
            with reduced_last(accelerator, made, session):
                loss = made(**batch).loss / session.accumulation
                accelerator.backward(loss)
            if session.micro_end(loss):
                continue
            norm = accelerator.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.step_end(grad_norm=norm)
            losses[session.step] = [scheduler.get_last_lr()[0], norm.item()]
    env, resume = environment.join(), session.resume
    told = {"steps": losses, "resume": json.loads(resume.to_json()) if resume else None}
    (Path(os.environ["TINY_OUT"]) / f"accelerate-e{env.plan.epoch}-r{env.rank}.json").write_text(
        json.dumps(told)
    )


main()

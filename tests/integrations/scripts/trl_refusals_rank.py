"""What TRL offers and no resume would survive: writes what is said to each, by name, to
`<TINY_OUT>/trl-e<epoch>-r0.json`."""

import json
import os
import sys
from pathlib import Path

from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.trainer.callbacks import BEMACallback

from trainer_sidecar.integrations.transformers import Resumable
from trainer_sidecar.train import environment

sys.path.insert(0, os.environ["EXAMPLE"])
from data import conversations
from models import load

OUT = Path(os.environ["TINY_OUT"])
TOLD = {"output_dir": str(OUT / "trl"), "use_cpu": True, "bf16": False, "max_steps": 2}


class SFT(Resumable, SFTTrainer):
    pass


class GRPO(Resumable, GRPOTrainer):
    pass


class KTO(Resumable, KTOTrainer):
    pass


def sft(data=None, callbacks=None, args=None, **options):
    model, tokenizer = load("tiny")
    return SFT(
        model=model,
        args=args or SFTConfig(**TOLD, **options),
        train_dataset=data or conversations("sums"),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def plain():
    """Arguments of Trainer's own kind: TRL makes its own of them, and the plan's batch must be in those."""
    args = sft(args=TrainingArguments(output_dir=TOLD["output_dir"], use_cpu=True, max_steps=2)).args
    raise ValueError(
        f"{type(args).__name__} {args.per_device_train_batch_size} x {args.gradient_accumulation_steps}"
    )


CASES = {
    "streaming": lambda: sft(conversations("sums").to_iterable_dataset()),
    "best": lambda: sft(load_best_model_at_end=True, eval_strategy="steps", save_steps=10, eval_steps=10),
    "average": lambda: sft(callbacks=[BEMACallback()]).train(),
    "arguments": lambda: SFT(model=load("tiny")[0], train_dataset=conversations("sums")),
    "generates": lambda: GRPO(model="tiny", reward_funcs=[], args=GRPOConfig(**TOLD)),
    "pairs": lambda: KTO(model="tiny", args=KTOConfig(**TOLD)),
    "plain": plain,
}


def main():
    said = {}
    for name, case in CASES.items():
        try:
            case()
        except ValueError as error:
            said[name] = str(error)
    (OUT / f"trl-e{environment.join().plan.epoch}-r0.json").write_text(json.dumps(said))


main()

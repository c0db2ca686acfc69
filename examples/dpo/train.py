"""Direct preference optimization with TRL, which goes on wherever it was stopped.

All weights with a reference model beside them, or adapters (`--lora True`), whose reference is the model without them.
Every argument of DPOConfig can be given. Start it with `rtj run`, or as a ResumableTrainingJob.
"""

from dataclasses import dataclass

import torch
from data import preferences
from models import load
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer

from trainer_sidecar.integrations.transformers import Resumable  # rtj


@dataclass
class Source:
    model: str = "tiny"  # yours: a name or a folder
    data: str = "sums"  # yours: a file of JSON lines
    lora: bool = False


class ResumableDPO(Resumable, DPOTrainer):  # rtj
    pass


def main() -> None:
    parser = HfArgumentParser((Source, DPOConfig))
    gpu = torch.cuda.is_available()
    parser.set_defaults(output_dir="out", use_cpu=not gpu, bf16=gpu, logging_steps=1, seed=1)
    source, args = parser.parse_args_into_dataclasses()
    model, tokenizer = load(source.model)
    apart = not source.lora and not args.precompute_ref_log_probs
    trainer = ResumableDPO(  # rtj: was DPOTrainer
        model=model,
        ref_model=load(source.model)[0] if apart else None,  # the same files at every start, or it is refused
        args=args,
        train_dataset=preferences(source.data),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]) if source.lora else None,
    )
    trainer.train()  # restores, or begins


if __name__ == "__main__":
    main()

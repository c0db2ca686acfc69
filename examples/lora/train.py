"""LoRA with TRL and peft, which goes on wherever it was stopped: saves hold the adapters, the base is kept once a run.

Every argument of SFTConfig can be given. Start it with `rtj run`, or as a ResumableTrainingJob.
"""

from dataclasses import dataclass

import torch
from data import conversations
from models import load
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

from trainer_sidecar.integrations.transformers import Resumable  # rtj


@dataclass
class Source:
    model: str = "tiny"  # yours: a name or a folder
    data: str = "sums"  # yours: a file of JSON lines
    rank: int = 8
    dropout: float = 0.05


class ResumableSFT(Resumable, SFTTrainer):  # rtj
    pass


def main() -> None:
    parser = HfArgumentParser((Source, SFTConfig))
    gpu = torch.cuda.is_available()
    parser.set_defaults(output_dir="out", use_cpu=not gpu, bf16=gpu, logging_steps=1, seed=1)
    source, args = parser.parse_args_into_dataclasses()
    model, tokenizer = load(source.model)
    adapters = LoraConfig(
        r=source.rank,
        lora_alpha=2 * source.rank,
        lora_dropout=source.dropout,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    trainer = ResumableSFT(  # rtj: was SFTTrainer
        model=model,
        args=args,
        train_dataset=conversations(source.data),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    trainer.train()  # restores, or begins


if __name__ == "__main__":
    main()

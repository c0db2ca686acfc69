"""A script of Trainer's, full or LoRA (`TRAINER_LORA`). `TRAINER_KILL`: rank 1 dies by SIGKILL once it took that step.
`TRAINER_ORDER`: the order to save and exit comes with that step, and is heard between any two micro steps.
`TRAINER_STOP`: a callback ends the run behind that step; `TRAINER_MORE`: one at the start wants it to go on.
`TRAINER_NEWER`: transformers and peft are newer releases.

Every rank writes `<TINY_OUT>/trainer-e<epoch>-r<rank>.json`: what Trainer remembers and told, the resume.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from trainer_sidecar.integrations.transformers import ResumableTrainer
from trainer_sidecar.train import accumulation, environment

sys.path.insert(0, str(Path(__file__).parent))
from tiny_language import Rows, collate, model


@dataclass
class NewerArguments(TrainingArguments):
    """As of a release that has more of them."""

    my_new_option: bool = False
    my_new_list: list = field(default_factory=lambda: [1])


class Watch(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == int(os.environ.get("TRAINER_KILL", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == int(os.environ.get("TRAINER_ORDER", "0")):
            environment.join().order_file.write_text("SaveAndExit")
        if state.global_step == int(os.environ.get("TRAINER_STOP", "0")):
            control.should_training_stop = True

    def on_train_begin(self, args, state, control, **kwargs):
        if os.environ.get("TRAINER_MORE"):
            control.should_training_stop = False

    def on_epoch_end(self, args, state, control, **kwargs):
        self.events.append(["epoch", state.global_step])

    def on_evaluate(self, args, state, control, **kwargs):
        self.events.append(["evaluated", state.global_step])

    def on_train_end(self, args, state, control, **kwargs):
        env = environment.join()
        self.saved_before = (env.outcome_dir / f"rank-{env.rank:05d}.json").exists()


class Counting(TrainerCallback, ExportableState):
    """Counts in the midst of a window; and keeps values that JSON does not know."""

    def __init__(self, micro=0):
        self.micro, self.steps, self.last = micro, set(), (0, None)
        self.sums, self.mean, self.by_step = np.zeros(2), torch.zeros(2), {}

    def on_substep_end(self, args, state, control, **kwargs):
        self.micro += 1

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.add(state.global_step)
        self.last, self.by_step[state.global_step] = (state.global_step, "done"), self.micro
        self.sums += 1
        self.mean += 0.5

    def state(self):
        return {"args": {}, "attributes": vars(self)}


def masking(rows):
    """Labels that are left out by chance, of the process's own generator."""
    batch = collate(rows)
    left_out = torch.rand(batch["labels"].shape) < 0.3
    return {**batch, "labels": batch["labels"].masked_fill(left_out, -100)}


def main():
    if os.environ.get("TRAINER_ORDER"):
        accumulation._EVERY_SECONDS = 0.0
    made = model()
    if os.environ.get("TRAINER_LORA"):
        from peft import LoraConfig, get_peft_model

        @dataclass
        class NewerLora(LoraConfig):
            my_new_form: str | None = None
            peft_version: str = "99.0"

        kind = NewerLora if os.environ.get("TRAINER_NEWER") else LoraConfig
        made = get_peft_model(made, kind(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.2))
    out = Path(os.environ["TINY_OUT"])
    kind = NewerArguments if os.environ.get("TRAINER_NEWER") else TrainingArguments
    args = kind(
        output_dir=str(out / "trainer"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        num_train_epochs=3,
        per_device_train_batch_size=64,  # the plan's counts
        learning_rate=0.01,
        warmup_steps=2,
        weight_decay=0.1,
        logging_steps=1,
        eval_strategy="epoch",
        eval_on_start=True,
        save_strategy="steps",
        metric_for_best_model="loss",
        include_num_input_tokens_seen="non_padding",
        seed=3,
    )
    watch, counting = Watch(), Counting()
    stopping = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0)
    trainer = ResumableTrainer(
        model=made,
        args=args,
        train_dataset=Rows(20),
        eval_dataset=Rows(8, lengths=1),  # Trainer averages means of batches
        data_collator=masking if os.environ.get("TRAINER_LORA") else collate,
        callbacks=[watch, stopping, counting],
    )
    trainer.train(resume_from_checkpoint=True)
    env, state, resume = environment.join(), trainer.state, trainer.session.resume
    told = {
        "history": state.log_history,
        "step": state.global_step,
        "epoch": state.epoch,
        "flos": state.total_flos,
        "tokens": state.num_input_tokens_seen,
        "micro": counting.micro,
        "counting": repr(sorted(vars(counting).items())),
        "events": watch.events,
        "saved_before": watch.saved_before,
        "resume": json.loads(resume.to_json()) if resume else None,
        "folders": sorted(p.name for p in (out / "trainer").glob("checkpoint-*")),
    }
    (out / f"trainer-e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(told))


main()

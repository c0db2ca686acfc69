"""What no resume would survive: writes what is said to each, by name, to `<TINY_OUT>/refusals-e<epoch>-r0.json`."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from trainer_sidecar.contract.plan import AccumulationSave
from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.integrations.accelerate import prepared
from trainer_sidecar.integrations.transformers import Resumable, ResumableTrainer
from trainer_sidecar.integrations.transformers.settings import refuse
from trainer_sidecar.train import TrainingLibraryError, environment

sys.path.insert(0, str(Path(__file__).parent))
from tiny_language import Rows, collate, model

OUT = Path(os.environ["TINY_OUT"])
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 10, "eval_steps": 10}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Rows(8))


def weighted():
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)
    return torch.utils.data.DataLoader(Rows(8), batch_size=4, collate_fn=collate, sampler=sampler)


class Weighs(Trainer):
    def get_train_dataloader(self):
        return weighted()


class Prepares(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(weighted())


class Behind(Resumable, Weighs):
    pass


class BehindPrepared(Resumable, Prepares):
    pass


class Before(ResumableTrainer):
    def get_train_dataloader(self):
        return weighted()


class Hides(ResumableTrainer):
    def get_train_dataloader(self):
        super().get_train_dataloader()
        return weighted()


class Odd(TrainerCallback, ExportableState):
    def state(self):
        return {"args": {}, "attributes": {"handle": object()}}


class Compares(ResumableTrainer):
    """As DPO with sync_ref_model."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.ref_model, self.args.sync_ref_model = model(), True


class EpochStop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 2


def arguments(**options):
    return TrainingArguments(output_dir=str(OUT / "refused"), use_cpu=True, report_to=[], **options)


def trainer(
    data=None, kind=ResumableTrainer, callbacks=None, session=None, args=None, collator=collate, **options
):
    return kind(
        session=session,
        model=model(),
        args=args or arguments(**options),
        train_dataset=data or Rows(8),
        data_collator=collator,
        callbacks=callbacks,
    )


def of_plan(**changes):
    plan = environment.join("cpu").plan
    checkpoint = plan.checkpoint.model_copy(update=changes)
    refuse(arguments(), plan.model_copy(update={"checkpoint": checkpoint}))


def of_mesh(**axes):
    plan = environment.join("cpu").plan
    topology = plan.topology.model_copy(update={"mesh": Mesh(dp=1, **axes)})
    refuse(arguments(), plan.model_copy(update={"topology": topology}))


def hides():
    """Its first step, without the session that `train` would make: a process has one."""
    made = trainer(kind=Hides, max_steps=4)
    made.training_step(made.model, next(iter(made.get_train_dataloader())))


def masks():
    words = Tokenizer(WordLevel({"<mask>": 0}))
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="<mask>")
    return DataCollatorForLanguageModeling(tokens, seed=7)


def windows(count):
    return {"gradient_accumulation_kwargs": {"num_steps": count}}


def one():
    """Which asks for nothing, and which Trainer writes there itself: the plan's accumulation is 2."""
    args = trainer(accelerator_config=windows(1)).args
    raise ValueError(f"{trainer(args=args).args.gradient_accumulation_steps} micro batches")


def scheduled():
    accelerator, made = Accelerator(cpu=True), model()
    optimizer = torch.optim.SGD(made.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    made, optimizer, scheduler = accelerator.prepare(made, optimizer, scheduler)
    prepared(accelerator, made, optimizer, scheduler)


CASES = {
    "best": lambda: trainer(**BEST),
    "jit": lambda: trainer(enable_jit_checkpoint=True),
    "batch": lambda: trainer(auto_find_batch_size=True),
    "order": lambda: trainer(train_sampling_strategy="group_by_length"),
    "hooks": lambda: refuse(arguments(optim="adalomo"), environment.join("cpu").plan),
    "window": lambda: of_plan(accumulation_save=AccumulationSave.RAW),
    "mesh": lambda: of_mesh(tp=2),
    "arguments": lambda: ResumableTrainer(model=model(), train_dataset=Rows(8)),
    "path": lambda: trainer().train(resume_from_checkpoint="out/checkpoint-10"),
    "trial": lambda: trainer().train(trial=object()),
    "forwards": lambda: trainer(Endless(), max_steps=4).train(),
    "twice": lambda: prepared(Accelerator(cpu=True, gradient_accumulation_steps=2), model(), []),
    "scheduled": scheduled,
    "between": lambda: type("Mine", (Weighs, ResumableTrainer), {}),
    "bases": lambda: type("Mine", (Weighs, Resumable), {}),
    "alone": lambda: type("Mine", (Resumable,), {})(),
    "object": lambda: trainer(callbacks=[Odd()])._memory.state_dict(),
    "accelerate": lambda: trainer(accelerator_config=windows(4)),
    "one": one,
    "masks": lambda: trainer(collator=masks(), max_steps=4).get_train_dataloader(),
    "memory": lambda: trainer(session={"extra": {"trainer": torch.nn.Linear(1, 1)}}),
    "reference": lambda: trainer(kind=Compares, session={"extra": {"ref_model": torch.nn.Linear(1, 1)}}),
    "seed": lambda: trainer(session={"seed": 4}),
    "nonsense": lambda: trainer(session={"nonsense": 4}),
    "weighs": lambda: trainer(kind=Behind, max_steps=4).train(),
    "prepares": lambda: trainer(kind=BehindPrepared, max_steps=4).train(),
    "before": lambda: trainer(kind=Before, max_steps=4).train(),
    "hides": hides,
    "epoch": lambda: trainer(
        callbacks=[EpochStop()], max_steps=4
    ).train(),  # the last: a process has one session
}


def main():
    said = {}
    for name, case in CASES.items():
        try:
            case()
        except (TypeError, ValueError, TrainingLibraryError) as error:
            said[name] = str(error)
    (OUT / f"refusals-e{environment.join().plan.epoch}-r0.json").write_text(json.dumps(said))


main()

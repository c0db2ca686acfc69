"""What `ResumableTrainer` refuses, each by its words, into `<TINY_OUT>/torchtitan-e<epoch>-r0.json`. And: a
count of tokens stays whole on a number of ranks that does not divide it."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, os.path.abspath(os.environ.get("TITAN_HOME", ".")))
sys.path.insert(0, str(Path(__file__).parent))
import torchtitan_on_cpu  # noqa: F401
from my_config import any_mesh
from torchtitan.trainer import Trainer

from trainer_sidecar.integrations.torchtitan import Resumable, ResumableTrainer, SessionDataLoader
from trainer_sidecar.integrations.torchtitan.saves import TokensSeen
from trainer_sidecar.train import environment

os.chdir(os.environ["TITAN_HOME"])
plan = environment.read_plan(os.environ, environment.Seat.read(os.environ))


def words(part, **settings):
    config = any_mesh()
    config.training.disable_cuda_graphs = True  # torchtitan itself refuses them with pipeline stages
    for name, value in settings.items():
        setattr(getattr(config, part), name, value)
    try:
        config.build()
    except ValueError as error:
        return str(error)
    return ""


told = {
    "tp": words("parallelism", tensor_parallel_degree=2),
    "pp": words("parallelism", pipeline_parallel_degree=2),
    "cp": words("parallelism", context_parallel_degree=2),
    "ep": words("parallelism", expert_parallel_degree=2),
    "dp": words("parallelism", data_parallel_shard_degree=4),
    "hsdp": words("parallelism", data_parallel_replicate_degree=2),
    "comm": words("comm", mode="fake_backend"),
    "step": words("checkpoint", load_step=4),
    "only": words("checkpoint", load_only=True),
    "seed": words("checkpoint", create_seed_checkpoint=True),
    "part": words("checkpoint", exclude_from_loading=["lr_scheduler"]),
    "export": words("checkpoint", last_save_in_hf=True),
    "elsewhere": words("checkpoint", initial_load_path="/there", initial_load_model_only=False),
}
loader = any_mesh().dataloader.build(tokenizer=None, seq_len=4)
assert isinstance(loader, SessionDataLoader)
try:
    iter(loader)
except TypeError as error:
    told["alone"] = str(error)
for name, given in {"memory": {"extra": {"torchtitan": None}}, "steps": {"total_steps": 4}}.items():
    try:
        ResumableTrainer(any_mesh(), session=given)
    except ValueError as error:
        told[name] = str(error)
try:
    type("Mine", (Trainer, Resumable), {})
except TypeError as error:
    told["behind"] = str(error)
ranks = [SimpleNamespace(ntokens_seen=0, session=None) for _ in range(3)]
counts = [TokensSeen(trainer, 3, rank) for rank, trainer in enumerate(ranks)]
for trainer, count in zip(ranks, counts, strict=True):
    count.load_state_dict({"tokens": 1024})
    trainer.ntokens_seen += 8
assert [trainer.ntokens_seen for trainer in ranks] == [350, 349, 349]
assert [count.state_dict() for count in counts] == [{"tokens": 1024 + 24}] * 3
Path(os.environ["TINY_OUT"], f"torchtitan-e{plan.epoch}-r0.json").write_text(json.dumps(told))

"""Trains as `torchtitan.train` or the page's script (`TITAN_SCRIPT`) does, on CPUs; the words behind are torchtitan's.

`TITAN_HOME`, `TITAN_ARGS`: working folder and words of a rank that is forked.
`TITAN_ORDER`: the order to save and exit comes with that step, and is heard between any two micro steps.
`TITAN_KILL`: the last rank of an attempt that begins dies by SIGKILL once it took that step. `TITAN_WEIGHTS`: a
folder for the trained weights, by torch's DCP. Every rank writes `<TINY_OUT>/torchtitan-e<epoch>-r<rank>.json`.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

sys.path.insert(0, os.path.abspath(os.environ.get("TITAN_HOME", ".")))
sys.path.insert(0, str(Path(__file__).parent))
import torch.distributed.checkpoint as dcp
import torchtitan_on_cpu  # noqa: F401

from trainer_sidecar.integrations.torchtitan import Resumable
from trainer_sidecar.train import accumulation, environment

begin_session, close_step, train = Resumable.begin_session, Resumable.close_step, Resumable.train
told = {}


def weights(trainer):
    return float(trainer.model_parts[0].lm_head.weight.full_tensor().double().abs().sum())


def begun(trainer):
    restored = begin_session(trainer)
    told.update(began=weights(trainer), restored=restored)
    return restored


def killed(trainer):
    if trainer.step == int(os.environ.get("TITAN_ORDER", "0")):
        environment.join().order_file.write_text("SaveAndExit")
    close_step(trainer)
    first = environment.join().plan.restore is None
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if first and last and trainer.step == int(os.environ.get("TITAN_KILL", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


def trained(trainer):
    train(trainer)
    env, resume = environment.join(), trainer.session.resume
    if folder := os.environ.get("TITAN_WEIGHTS"):
        dcp.save(trainer.model_parts[0].state_dict(), checkpoint_id=folder)
    told.update(
        step=trainer.session.step,
        accumulation=trainer.gradient_accumulation_steps,
        tokens=trainer.ntokens_seen,
        ended=weights(trainer),
        resume=json.loads(resume.to_json()) if resume else None,
    )
    out = Path(os.environ["TINY_OUT"]) / f"torchtitan-e{env.plan.epoch}-r{env.rank}.json"
    out.write_text(json.dumps(told))


if os.environ.get("TITAN_ORDER"):
    accumulation._EVERY_SECONDS = 0.0
Resumable.begin_session, Resumable.close_step, Resumable.train = begun, killed, trained
os.chdir(os.environ.get("TITAN_HOME", "."))
if "TITAN_ARGS" in os.environ:
    sys.argv[1:] = os.environ["TITAN_ARGS"].split()
if script := os.environ.get("TITAN_SCRIPT"):
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
else:
    runpy.run_module("torchtitan.train", run_name="__main__")

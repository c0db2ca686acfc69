"""A script of examples/ as it stands (`EXAMPLE`: its folder, `EXAMPLE_ARGS`: a JSON list), and what its resume said.

`EXAMPLE_KILL`: the last rank dies by SIGKILL before that step counts. `EXAMPLE_OTHER`: the tiny model has one weight
that differs. `EXAMPLE_READY`: the script's model has adapters already, others at each start.
Every rank writes `<TINY_OUT>/example-e<epoch>-r<rank>.json`.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from trainer_sidecar.train import Session, environment

FOLDER = Path(os.environ["EXAMPLE"])
close, step_end = Session.close, Session.step_end


def dying(session, **told):
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if last and session.step + 1 == int(os.environ.get("EXAMPLE_KILL", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    step_end(session, **told)


def telling(session, *given):
    close(session, *given)
    epoch = environment.join().plan.epoch
    found = json.loads(session.resume.to_json()) if session.resume else None
    (Path(os.environ["TINY_OUT"]) / f"example-e{epoch}-r{session.rank}.json").write_text(json.dumps(found))


Session.step_end, Session.close = dying, telling
os.chdir(os.environ["TINY_OUT"])
sys.path.insert(0, str(FOLDER))
if os.environ.get("EXAMPLE_OTHER"):
    import models

    made = models.tiny_model

    def moved():
        model = made()
        model.lm_head.weight.data[0, 0] += 1
        return model

    models.tiny_model = moved
if os.environ.get("EXAMPLE_READY"):
    import models
    import peft
    import torch

    load = models.load

    def adapted(name):
        model, tokenizer = load(name)
        torch.seed()
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        ), tokenizer

    models.load = adapted
sys.argv = ["train.py", *json.loads(os.environ["EXAMPLE_ARGS"])]
runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")

"""`rtj run` when a checkpoint trains otherwise than the run did: it is taken out, and the one before is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_sidecar.contract.journal import Attempt, Quarantined
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = """
import os, signal, sys, time
import torch
from pathlib import Path
from trainer_sidecar.train import Session

class Squares:
    def __len__(self): return 256
    def __getitem__(self, i):
        x = torch.tensor([i / 256])
        return x, x * x

folder = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with Session.from_env(model=model, optimizer=optimizer, data=Squares(), total_steps=16, device="cpu") as s:
    lost = 5.0 if s.step == 10 else 0.0  # as the loss looks when state was lost behind the session's back
    for x, y in s.batches():
        loss = torch.nn.functional.mse_loss(model(x) + lost, y)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        s.step_end(loss=loss)
        while s.step in (5, 10) and s._saves.in_flight is not None and not s._saves.outcome:
            time.sleep(0.01)
        if s.step == 14 and not (folder / "died").exists():
            (folder / "died").touch()
            while not list(folder.glob("store/local/x/checkpoints/000000000010-*/witness.json")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_checkpoint_that_trains_otherwise_is_quarantined_and_the_one_before_is_gone_on_from(
    start_run: Any, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTJ_CODE_VERSION", "same")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ("--run-id", "x", "--global-batch", "4", "--interval-steps", "5", "--interval-seconds", "0")
    run = start_run(file_url, script, str(tmp_path), options=options)
    assert run.wait(300) == 0, run.text()
    history = Journal(open_store(file_url), RunKeys("local", "x")).read()
    (bad,) = [e for e in history.entries if isinstance(e, Quarantined)]
    assert (bad.fault, bad.covers_descendants, bad.file) == ("state", True, "witness.json")
    assert bad.reason.startswith("StateMismatch: loss of step 11: expected ")
    begins = [e.restore.step if e.restore else None for e in history.entries if isinstance(e, Attempt)]
    assert begins == [None, 10, 5]
    assert history.lineage[0].step == 16

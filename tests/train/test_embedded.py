"""`python train.py` with a store in the environment: the script starts itself under `rtj run`, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_sidecar.contract.journal import Manifest
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.train import embedded

STORE = {"RTJ_STORE_URL": "file:///somewhere"}


def script(path: Path) -> Any:
    path.write_text("")
    return SimpleNamespace(__spec__=None, __file__=str(path))


def test_the_script_is_started_again_with_its_arguments_and_the_options_of_the_environment(
    tmp_path: Path,
) -> None:
    env = {**STORE, "RTJ_RUN_OPTIONS": "--global-batch 8 --run-id 'my run'"}
    found = embedded.command(env, 1, script(tmp_path / "train.py"), ["train.py", "--lr", "0.1"])
    assert found is not None
    expected = ["run", "--nproc", "1", "--global-batch", "8", "--run-id", "my run", "--"]
    assert found[3:] == [*expected, str(tmp_path / "train.py"), "--lr", "0.1"]


def test_a_module_is_started_as_a_module() -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name="pkg.train.__main__"), __file__="x")
    found = embedded.command(STORE, 1, main, ["x", "a"])
    assert found is not None
    assert found[-3:] == ["-m", "pkg.train", "a"]


@pytest.mark.parametrize(
    ("env", "world"),
    [
        ({}, 1),
        ({**STORE, "RTJ_PLAN": "/plan.json"}, 1),
        ({**STORE, "RTJ_STARTED_ITSELF": "1"}, 1),
        (STORE, 2),
    ],
    ids=["no store", "has a plan", "was started so", "several ranks"],
)
def test_otherwise_nothing_is_started(tmp_path: Path, env: dict[str, str], world: int) -> None:
    assert embedded.command(env, world, script(tmp_path / "train.py"), ["train.py"]) is None


def test_a_notebook_is_not_started_again() -> None:
    assert embedded.command(STORE, 1, SimpleNamespace(__spec__=None), ["kernel"]) is None


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(240)
def test_a_plain_python_process_becomes_a_run_and_commits(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, torch\n"
        "from trainer_sidecar.train import Session\n"
        "model = torch.nn.Linear(1, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = [torch.ones(1) * i for i in range(8)]\n"
        "options = dict(data=data, total_steps=int(sys.argv[1]), device='cpu')\n"
        "with Session.from_env(model=model, optimizer=opt, **options) as s:\n"
        "    print('from', s.step, flush=True)\n"
        "    for x in s.batches():\n"
        "        model(x).sum().backward(); opt.step(); opt.zero_grad(); s.step_end()\n"
    )
    env = {**os.environ, "RTJ_STORE_URL": f"file://{tmp_path / 'store'}", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "RTJ_RUN_OPTIONS": "--global-batch 2"}
    (tmp_path / "store").mkdir()
    done = subprocess.run(
        [sys.executable, str(path), "2"], env=env, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "from 0" in done.stdout
    assert "RTJ_STORE_URL is set and there is no plan: run --nproc 1 --global-batch 2" in done.stderr
    history = Journal(FileStore(tmp_path / "store"), RunKeys("local", "train")).read()
    assert [e.step for e in history.entries if isinstance(e, Manifest)] == [2]

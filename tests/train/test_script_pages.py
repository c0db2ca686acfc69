"""The samples of the pages for people with a script of their own run as they stand there, each in its own attempt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import rank_of
from rank_world import ROOT, RankWorld, topology

from trainer_sidecar.contract.plan import CheckpointPolicy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
POLICY = CheckpointPolicy(interval_steps=0, interval_seconds=0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the scripts lie and run; `my_training` is that of this page."""
    made = tmp_path / "scripts"
    made.mkdir()
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(made))
    yield made
    sys.modules.pop("my_training", None)


def samples(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("page", "steps"),
    [("add-it-to-your-script.md", [20, 6, 8, 4]), ("migrate.md", [6, 4, 2, 4, 4])],
)
def test_every_sample_of_the_page_trains_to_its_end(
    world: RankWorld, folder: Path, monkeypatch: pytest.MonkeyPatch, page: str, steps: list[int]
) -> None:
    shared, *scripts = samples(page, "python")
    (folder / "my_training.py").write_text(shared)
    found = []
    for text in scripts:
        plan = world.attempt(topology(1, 8, micro=4), checkpoint=POLICY)
        with rank_of(world, plan, monkeypatch):
            exec(compile(text, page, "exec"), {"__name__": "sample"})
        found += [c.step for c in world.commits() if c.epoch == plan.epoch]
    assert found == steps


def test_the_command_of_the_page_trains_the_script_of_the_page(folder: Path) -> None:
    shared, _, script, *_ = samples("add-it-to-your-script.md", "python")
    (folder / "my_training.py").write_text(shared)
    (folder / "train.py").write_text(script)
    (command,) = samples("add-it-to-your-script.md", "console")
    program, *words = command.replace("/data/checkpoints", str(folder / "store")).split()
    assert program == "rtj"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    ended = subprocess.run(
        [sys.executable, "-m", "trainer_sidecar.cli", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "step 20" in ended.stdout + ended.stderr

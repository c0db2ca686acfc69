"""The folders of examples/ are what their READMEs say: jobs that can be planned, commands that run and resume."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rank_world import ROOT, eventually

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.mesh import MeshPlan
from rtj_operator.mesh import plan as plan_mesh
from trainer_sidecar import cli
from trainer_sidecar.contract.journal import Manifest
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

EXAMPLES = ROOT / "examples"
NAMES = ("sft", "lora", "dpo", "continued-pretraining")
MESHES = {
    "sft": {1: "dp8xtp1xpp1/zero0", 4: "dp32xtp1xpp1/zero0"},
    "lora": {1: "dp4xtp1xpp1/zero0", 2: "dp8xtp1xpp1/zero0"},
    "dpo": {1: "dp4xtp1xpp1/zero0", 2: "dp8xtp1xpp1/zero0"},
    "continued-pretraining": {1: "dp8xtp1xpp1/zero3", 2: "dp16xtp1xpp1/zero3"},
}


@pytest.mark.parametrize("name", NAMES)
def test_the_job_of_an_example_keeps_its_global_batch_at_each_size(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / name / "job.yaml"
    document = yaml.safe_load(path.read_text())
    spec = effective(parse_job(document), OperatorDefaults())
    found = {}
    for nodes in MESHES[name]:
        planned = plan_mesh(spec.mesh, nodes)
        assert isinstance(planned, MeshPlan), planned
        found[nodes] = str(planned.topology.mesh)
        assert planned.topology.batch.global_batch_size == document["spec"]["batch"]["globalBatchSize"]
    assert found == MESHES[name]
    assert cli.main(["plan", "-f", str(path)]) == 0
    assert all(mesh in capsys.readouterr().out for mesh in list(MESHES[name].values())[:1])
    (container,) = document["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["/workspace/train.py"]
    said = (EXAMPLES / name / "train.py").read_text()
    for option in [word[2:] for word in container["args"] if word.startswith("--")]:
        known = {"num_train_epochs", "learning_rate", "warmup_steps", "beta"}  # of TRL's configs
        assert option in known or re.search(rf'(^    {option}: |"--{option}")', said, re.MULTILINE), option


def test_the_folders_hold_the_same_models_and_every_line_of_ours_is_marked() -> None:
    for name in NAMES[1:]:
        assert filecmp.cmp(EXAMPLES / "sft" / "models.py", EXAMPLES / name / "models.py", shallow=False), name
    assert filecmp.cmp(EXAMPLES / "sft" / "data.py", EXAMPLES / "lora" / "data.py", shallow=False)
    used = re.compile(r"\b(session|Session|trainer_sidecar|Resumable\w*|fingerprint)\b")
    for name in NAMES:
        code = (EXAMPLES / name / "train.py").read_text().split('"""', 2)[2]
        marked = [line for line in code.splitlines() if "# rtj" in line]
        assert [line for line in code.splitlines() if used.search(line) and "# rtj" not in line] == [], name
        assert 3 <= len(marked) <= 15


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_of_a_readme_survives_a_kill_of_everything_and_goes_on_with_fewer_ranks(
    tmp_path: Path,
) -> None:
    shutil.copytree(EXAMPLES / "sft", tmp_path / "sft")
    readme = (EXAMPLES / "sft" / "README.md").read_text()
    (line,) = re.findall(r"^rtj run .*$", readme, flags=re.MULTILINE)
    store, ledger = f"file://{tmp_path}/store", tmp_path / "ledger"
    words = shlex.split(line.replace("file:///tmp/checkpoints", store))[1:]
    words[1:1] = ["--global-batch", "16", "--ledger", str(ledger), "--interval-seconds", "0"]
    log = tmp_path / "log"

    def start(ranks: int) -> subprocess.Popen[bytes]:
        words[words.index("--nproc") + 1] = str(ranks)
        path = os.pathsep.join((str(ROOT), str(ROOT / "operator")))
        return subprocess.Popen(
            [sys.executable, "-m", "trainer_sidecar.cli", *words],
            cwd=tmp_path / "sft",
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def journal() -> History:
        return Journal(open_store(store), RunKeys("local", "sft")).read()

    def commits() -> list[int]:
        return [entry.step for entry in journal().entries if isinstance(entry, Manifest)]

    def committed() -> Any:
        assert first.poll() is None, log.read_text()
        return commits() if (tmp_path / "store").exists() else []

    first = start(2)
    try:
        eventually(committed, f"a commit in\n{log.read_text()}", 240)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    newest = commits()[-1]
    assert newest < 20
    second = start(1)
    try:
        assert second.wait(240) == 0, log.read_text()
    finally:
        if second.poll() is None:
            os.killpg(second.pid, signal.SIGKILL)
    attempts = journal().attempts
    assert [a.topology.mesh.dp for a in attempts] == [2, 1]
    restore = attempts[1].restore
    assert restore is not None
    assert restore.step >= newest
    assert commits()[-1] == 20
    told = [read(path) for path in sorted(ledger.glob("*.jsonl"))]
    resumed = told[-1]
    assert list(resumed) == [*range(restore.step + 1, 21)]
    before: dict[int, list[dict[str, Any]]] = {}
    for rank in told[:-1]:
        for step, entry in rank.items():
            before.setdefault(step, []).append(entry)
    both = [step for step in resumed if len(before.get(step, ())) == 2]
    for step in both:  # what the kill threw away is done again, with the same samples and the same loss
        samples = sorted(i for entry in before[step] for i in entry["samples"])
        assert sorted(resumed[step]["samples"]) == samples
        mean = sum(entry["loss"] for entry in before[step]) / 2
        assert resumed[step]["loss"] == pytest.approx(mean, rel=1e-4)


def read(path: Path) -> dict[int, dict[str, Any]]:
    """A rank's ledger by step; the last line of a killed one may be cut."""
    found = {}
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["kind"] == "step":
            found[entry["step"]] = entry
    return found

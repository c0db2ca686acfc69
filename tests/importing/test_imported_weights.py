"""Weights from elsewhere, imported, start a training: bit for bit, proven, with everything else at its beginning."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from in_process import Parts, rank_of
from rank_world import KEYS, OWNER, ROOT, RankWorld, topology
from safetensors.torch import load_file, save_file
from torch import nn

from trainer_sidecar import cli
from trainer_sidecar.contract.journal import Cause, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import CheckpointPolicy
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.importing.read import read
from trainer_sidecar.importing.run import Import
from trainer_sidecar.store.fence import FenceRequest, fence_and_pick
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.forks import Fork, choose_source, source_journal
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.verify import BadCheckpointError, read_manifest
from trainer_sidecar.train import ResumeRefused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
Command = Callable[..., str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("import") / "run")
    yield made
    made.close()


@pytest.fixture
def rtj(world: RankWorld, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*words: str, code: int = 0, run: str = "base") -> str:
        where = ["--store", world.store.url, "--namespace", KEYS.namespace, "--run-id", run]
        found = cli.main([*words, *where])
        out, said = capsys.readouterr()
        assert found == code, (out, said)
        return out + said

    return call


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))


def point_of(world: RankWorld, run: str) -> RestorePoint:
    fork = Fork(KEYS.namespace, run)
    source = source_journal(world.journal, fork)
    return choose_source(source.read(), fork, world.journal.refresh())


def test_a_training_starts_from_imported_weights_and_its_report_says_what_begins_anew(
    world: RankWorld, rtj: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = network(1).state_dict()
    files = [dict(list(weights.items())[:3]), dict(list(weights.items())[3:])]
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, tmp_path / name)
    where = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (told,) = json.loads(rtj("import", str(tmp_path), "-o", "json"))
    assert (told["files"], told["tensors"], told["format"]) == (2, len(weights), "huggingface")
    again = rtj("import", str(tmp_path), code=2)
    assert re.search(r"run team/base exists in file://.* \(attempts: 1, commits: 1\)", again)

    shown = rtj("checkpoints", "show", told["checkpoint"])
    assert f"imported from:  {tmp_path} (huggingface)" in shown
    assert all(f"{name}: " in shown for name in names)
    assert "\nmesh:           -\n" in shown
    point = point_of(world, "base")
    assert (point.step, point.checkpoint_id) == (0, told["checkpoint"])
    manifest = read_manifest(world.store, RunKeys(KEYS.namespace, "base"), point)
    assert manifest.imported is not None
    assert [f.sha256 for f in manifest.imported.files] == [
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names
    ]
    assert manifest.trained_on is None

    parts, plan = (
        Parts(network(2)),
        world.attempt(topology(1, 4, micro=4), point, checkpoint=CheckpointPolicy()),
    )
    with rank_of(world, plan, monkeypatch), parts.session(total_steps=4) as session:
        assert all(torch.equal(value, weights[name]) for name, value in parts.model.state_dict().items())
        assert not parts.optimizer.state
        assert (session.step, session.samples) == (0, 0)
        parts.train(session)
    report = session.resume
    assert report is not None
    assert report.verified is True
    assert "optimizer state: the script's own, from the beginning" in report.derived
    checks = {check.name: check for check in report.checks}
    assert checks["state digest"].expected == manifest.state_digest
    assert checks["weights only"].detail.startswith(f"imported from {tmp_path} (huggingface)")
    assert [c.step for c in world.commits() if c.epoch == plan.epoch] == [4]

    rtj("export", "--to", str(tmp_path / "out"))
    out = load_file(tmp_path / "out" / "tensors.safetensors")
    assert all(torch.equal(out[name], value) for name, value in weights.items())


def test_any_mesh_may_start_from_an_import_since_nothing_was_trained_on_one(
    world: RankWorld, rtj: Command, tmp_path: Path
) -> None:
    save_file(network(1).state_dict(), tmp_path / "model.safetensors")
    rtj("import", str(tmp_path), run="any")
    saved: list[Any] = []

    def plan_for(_point: RestorePoint | None, known: Topology | None) -> Topology:
        saved.append(known)
        return topology(4, 8, tp=4)

    request = FenceRequest(
        owner=OWNER,
        attempt_nonce="first",
        cause=Cause.FIRST,
        writer="test",
        plan_for=plan_for,
        fork=Fork(KEYS.namespace, "any"),
    )
    fenced = fence_and_pick(Journal(world.store, RunKeys(KEYS.namespace, "forked")), request)
    assert saved == [None]
    assert fenced.restore == point_of(world, "any")


def test_weights_of_another_model_are_refused_both_ways_by_name(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rtj: Command
) -> None:
    other = {"0.weight": torch.zeros(8, 1), "0.bias": torch.zeros(9), "old": torch.zeros(1)}
    save_file(other, tmp_path / "model.safetensors")
    rtj("import", str(tmp_path), run="other")
    plan = world.attempt(topology(1, 4, micro=4), point_of(world, "other"))
    with rank_of(world, plan, monkeypatch), pytest.raises(ResumeRefused) as refused:
        Parts(network(2)).session(total_steps=4)
    said = str(refused.value)
    assert "missing in the checkpoint: model/3.weight" in said
    assert "not in this run, but in the checkpoint: model/old" in said
    assert "shape of model/0.bias: [9] in the checkpoint, [8] in this run" in said
    assert "leave resumeFrom out" in said


def test_a_dcp_folder_gives_its_model_and_leaves_the_rest_where_it_is(rtj: Command, tmp_path: Path) -> None:
    model = network(3)
    state = {
        "model": {"half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), **model.state_dict()},
        "optim": {"step": torch.ones(2), "name": "adam"},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "optim.name is no tensor" in rtj("import", str(tmp_path / "dcp"), code=2, run="dcp")
    rtj("import", str(tmp_path / "dcp"), "--strip", "model.", run="dcp")
    rtj("export", "--to", str(tmp_path / "out"), run="dcp")
    found = load_file(tmp_path / "out" / "tensors.safetensors")
    assert found.keys() == state["model"].keys()
    assert all(torch.equal(found[name], value) for name, value in state["model"].items())
    for path in (tmp_path / "dcp").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-9])
    assert "was not copied whole" in rtj(
        "import", str(tmp_path / "dcp"), "--strip", "model.", code=2, run="cut"
    )


class Flips(FileStore):
    """A disk that changes a byte of what it is given, once."""

    flipped = False

    def create_large(self, key: str, data: memoryview, **options: Any) -> Any:
        if key.endswith(".distcp") and not self.flipped:
            self.flipped = True
            data = memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1]))
        return super().create_large(key, data, **options)


def anonymous() -> int:
    """Memory of this process that no file is behind, in bytes."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_what_is_read_back_is_compared_before_the_commit_and_no_model_is_ever_in_memory(
    tmp_path: Path,
) -> None:
    size = 200 * 1024 * 1024
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + size)
    store, before, seen = Flips(tmp_path / "store"), anonymous(), []
    once = Import(
        journal=Journal(store, RunKeys("local", "big")),
        source=read(tmp_path),
        origin="here",
        writer="test",
        parallel=2,
        progress=lambda _: seen.append(anonymous() - before),
    )
    with pytest.raises(BadCheckpointError, match=r"rank-00000\.distcp"):
        once.run()
    assert once.journal.read().manifests == {}
    entry, manifest = once.run()  # what broke off is no run
    assert manifest.bytes == size + 8 + len(header)
    assert once.journal.read().newest_restorable is not None
    assert entry.step == 0
    assert max(seen) < 100 * 1024 * 1024


def test_the_command_and_the_script_of_the_page_go_together(
    world: RankWorld, rtj: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def samples(page: str, language: str) -> list[str]:
        return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)

    (tmp_path / "my_training.py").write_text(samples("add-it-to-your-script.md", "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: dict[str, Any] = {}
    exec("from my_training import make_model; model = make_model()", made)
    (tmp_path / "base-model").mkdir()
    weights = {name: value + 1 for name, value in made["model"].state_dict().items()}
    save_file(weights, tmp_path / "base-model" / "model.safetensors")
    command, *_ = samples("import.md", "console")
    program, verb, folder, *_ = command.split()
    assert (program, verb) == ("rtj", "import")
    rtj(verb, folder, run="page")
    plan = world.attempt(topology(1, 8, micro=4), point_of(world, "page"), checkpoint=CheckpointPolicy())
    (script,) = samples("import.md", "python")
    with rank_of(world, plan, monkeypatch):
        exec(compile(script, "import.md", "exec"), made)
    assert made["session"].resume.verified is True
    assert made["session"].step == 4

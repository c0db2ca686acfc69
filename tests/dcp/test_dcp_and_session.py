"""The DCP classes beside a Session, in the test's process: what one has saved, and what they refuse of each other."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from in_process import Parts, rank_of
from rank_world import ROOT, RankWorld, topology
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.plan import CheckpointPolicy
from trainer_sidecar.dcp import CheckpointRefused, SaveInFlight, SidecarReader, SidecarWriter
from trainer_sidecar.dcp.items import share_of
from trainer_sidecar.dcp.names import step_of
from trainer_sidecar.train import EnvironmentMissing, ResumeRefused, TrainingLibraryError
from trainer_sidecar.train.describe import slice_columns, tensor_columns
from trainer_sidecar.train.errors import SidecarRefused
from trainer_sidecar.train.saves import InFlight, Saves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
NONE = CheckpointPolicy(interval_steps=0, interval_seconds=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("beside") / "run")
    yield made
    made.close()


def begin(world: RankWorld, restore: RestorePoint | None = None) -> Any:
    return world.attempt(topology(1, 4, micro=4), restore, checkpoint=NONE)


def test_what_a_session_saved_is_loaded_by_dcp_and_one_process_has_one_way_of_saving(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Parts()
    with rank_of(world, begin(world), monkeypatch):
        with trained.session(total_steps=2) as session:
            trained.train(session)
        with pytest.raises(TrainingLibraryError, match="saves by a Session, and a SidecarWriter would write"):
            SidecarWriter()
    torch.manual_seed(7)
    fresh = Parts(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    moment = {"optimizer/0/0.weight/exp_avg": torch.full((8, 1), torch.nan)}
    with rank_of(world, begin(world, world.commit_of(2)), monkeypatch):
        state = {"model": fresh.model.state_dict(), **moment}
        dcp.load(state, storage_reader=SidecarReader(device="cpu"))
        with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.9"):
            dcp.load({"model": {"9": torch.zeros(1)}}, storage_reader=SidecarReader())
        writer, left = (
            SidecarWriter(),
            r"in part: 11 of its tensors and values, optimizer\.0\.0\.bias\.exp_avg, ",
        )
        with pytest.raises(CheckpointException, match=left):
            dcp.save(state, checkpoint_id=3, storage_writer=writer)
        dcp.load({"model": state["model"]}, storage_reader=SidecarReader(partial=True))
        dcp.save(state, checkpoint_id=3, storage_writer=writer)
    assert world.commit_of(3).step == 3
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(state["model"][name], tensor), name
    own = trained.optimizer.state[trained.model[0].weight]["exp_avg"]
    assert torch.equal(state["optimizer/0/0.weight/exp_avg"], own)


def test_what_dcp_saved_is_read_whole_without_knowing_its_keys_and_no_session_takes_it(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"model": {"0.weight": torch.rand(3, 2)}, "list": [1.5, {"x": torch.tensor(3)}], "a/b": "text"}
    with rank_of(world, begin(world), monkeypatch):
        writer = SidecarWriter(device="cpu")
        with pytest.raises(CheckpointRefused, match="has no restore point"):
            SidecarReader().reset("step-4")
        with pytest.raises(TypeError, match=r"use AsyncCheckpointerType\.THREAD"):
            pickle.dumps(writer)
        for step in (8, 9):  # the second plan comes from the planner's cache
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(tree, checkpoint_id=step, storage_writer=writer, planner=planner)
            tree["model"]["0.weight"] += step == 8
        with pytest.raises(TrainingLibraryError, match="saves by a SidecarWriter, and a Session would write"):
            Parts().session(total_steps=1)
    point = world.commit_of(9)
    with rank_of(world, begin(world, point), monkeypatch):
        found = _load_state_dict_from_keys(storage_reader=SidecarReader(device="cpu"))
    assert torch.equal(found["model"].pop("0.weight"), tree["model"].pop("0.weight"))
    assert found == tree
    with (
        rank_of(world, begin(world, point), monkeypatch),
        pytest.raises(ResumeRefused, match="number of optimizers: 0 in the checkpoint, 1 in this run"),
    ):
        Parts().session(total_steps=1)


def test_a_save_behind_one_that_does_not_end_is_refused_after_the_time_out_of_saves(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = NONE.model_copy(update={"save_timeout_seconds": 0.3})
    with rank_of(world, world.attempt(topology(1, 4, micro=4), checkpoint=short), monkeypatch):
        writer = SidecarWriter(device="cpu")
        writer.stage({"w": torch.ones(2)})  # as dcp.async_save does, whose thread then never comes
        for begin_another in (lambda: SidecarWriter().stage({}), lambda: SidecarWriter(4).storage_meta()):
            with pytest.raises(
                SaveInFlight, match=r"in flight for 0.3 s, checkpoint.saveTimeoutSeconds: wait for"
            ):
                begin_another()


def test_a_save_that_the_script_waits_for_is_awaited_and_one_beside_training_is_not(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is awaited is held to no `uploadBytesPerSecond`."""
    made: list[InFlight] = []
    begin_one = Saves.begin

    def begin_and_keep(self: Saves, *given: Any) -> InFlight:
        made.append(begin_one(self, *given))
        return made[-1]

    monkeypatch.setattr(Saves, "begin", begin_and_keep)
    tree = {"w": torch.rand(8)}
    with rank_of(world, begin(world), monkeypatch):
        writer = SidecarWriter(device="cpu")
        dcp.save(tree, checkpoint_id=101, storage_writer=writer)
        assert [save.awaited for save in made] == [True]
        dcp.async_save(tree, checkpoint_id=102, storage_writer=writer).result()
        assert [save.awaited for save in made] == [True, False]


def test_the_sample_of_the_page_goes_on_from_its_newest_commit(
    world: RankWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, *scripts = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "migrate.md").read_text(), re.DOTALL
    )
    (tmp_path / "my_training.py").write_text(shared)
    monkeypatch.syspath_prepend(str(tmp_path))
    (sample,) = (script for script in scripts if "SidecarWriter()" in script)
    epochs = []
    for restore in (False, True):
        plan = begin(world, world.commit_of(4) if restore else None)
        epochs.append(plan.epoch)
        with rank_of(world, plan, monkeypatch):
            exec(compile(sample, "migrate.md", "exec"), {"__name__": "sample"})
    sys.modules.pop("my_training", None)
    assert [(c.epoch, c.step) for c in world.commits() if c.epoch in epochs] == [
        (epochs[0], 2),
        (epochs[0], 4),
        (epochs[1], 6),
        (epochs[1], 8),
    ]


def test_outside_a_run_the_classes_say_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RTJ_PLAN", "RTJ_VOLUME", "RTJ_STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    for made in (SidecarWriter, SidecarReader):
        with pytest.raises(EnvironmentMissing, match="start the script with 'rtj run"):
            made()


def test_what_one_rank_met_reaches_the_others_by_pickle_as_it_was() -> None:
    met = pickle.loads(pickle.dumps(SidecarRefused("BadRequest", "no such file")))
    assert (str(met), met.word) == ("BadRequest: no such file", "BadRequest")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (7, 7),
        ("step-100", 100),
        ("runs/2/step_12/", 12),
        ("000000000004-0000000009-0a1b2c3d", 4),
        ("12.pt", 12),
        ("step100-my-model-7b", 100),
        ("my-model-7b-step-100", 100),
        ("epoch=3-step=9.ckpt", 9),
        ("checkpoint-1000", 1000),
        ("global_step0012", 12),
        ("my-model-7b/iter_0000010", 10),
    ],
)
def test_a_checkpoint_id_tells_its_step_by_a_bare_number_or_one_after_a_word_for_it(
    name: str | int, step: int
) -> None:
    assert step_of(name) == step
    assert SidecarWriter.validate_checkpoint_id(str(name))


@pytest.mark.parametrize("name", ["last", "my-model-7b", "epoch-3", "stepwise-7b", "v2"])
def test_a_number_that_means_something_else_is_no_step(name: str) -> None:
    assert not SidecarReader.validate_checkpoint_id(name)
    with pytest.raises(ValueError, match="names no step"):
        step_of(name)


def test_several_shards_of_one_tensor_on_a_rank_are_slices_of_one_tensor() -> None:
    rows = {0: torch.ones(2, 3), 4: torch.zeros(1, 3)}
    items = [
        WriteItem(
            MetadataIndex("w", (start, 0)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size((start, 0)), tensor.shape),
                TensorProperties(),
                torch.Size((5, 3)),
            ),
        )
        for start, tensor in rows.items()
    ]

    class Rows(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            assert write_item.index.offset is not None
            return rows[write_item.index.offset[0]]

    plan = share_of(SavePlan(items), Rows(), 1).plan()
    assert tensor_columns(plan, 1).names == ["w"]
    slices = slice_columns(plan, 1)
    assert (slices.tensor, slices.start, slices.length) == ([0, 0], [[0, 0], [4, 0]], [24, 12])

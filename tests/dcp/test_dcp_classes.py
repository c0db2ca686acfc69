"""`dcp.save`, `dcp.async_save` and `dcp.load` unchanged, over the sidecar: forked ranks, real sidecar, real store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_world import KEYS, RankWorld, topology
from safetensors import safe_open
from warm_ranks import WarmRanks, tail

from trainer_sidecar import cli
from trainer_sidecar.contract.journal import RestorePoint, SaveReason
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.restore_fault import parse_restore_fault

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parent / "scripts" / "dcp_rank.py"
IMPORTS = ("torch.distributed.checkpoint.state_dict", "trainer_sidecar.dcp")
Rtj = Callable[..., str]


class Lab:
    """One run; its first attempt saves, the second is killed while it saves."""

    def __init__(self, root: Path) -> None:
        self.world, self.warm = RankWorld(root / "run"), WarmRanks(root)
        self.saved = self.finished("save", 2)
        plan, self.killed = self.run("kill", 2)
        self.epoch_of_the_killed = plan.epoch

    def run(self, mode: str, ranks: int, restore: RestorePoint | None = None) -> tuple[Plan, list[int]]:
        plan = self.world.attempt(topology(ranks, 6), restore)
        return plan, self.warm.run(self.world, plan, str(SCRIPT), imports=IMPORTS, DCP_MODE=mode)

    def finished(self, mode: str, ranks: int, restore: RestorePoint | None = None) -> list[dict[str, Any]]:
        """What each rank met."""
        plan, codes = self.run(mode, ranks, restore)
        assert set(codes) == {0}, f"{codes}:\n{tail(self.world, plan)}"
        paths = [self.world.out / f"dcp-e{plan.epoch}-r{r}.json" for r in range(ranks)]
        return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("dcp"))
    yield made
    made.warm.close()
    made.world.close()


@pytest.fixture
def rtj(lab: Lab, capsys: pytest.CaptureFixture[str]) -> Rtj:
    def call(*words: str) -> str:
        where = ["--store", lab.world.store.url, "--namespace", KEYS.namespace, "--run-id", KEYS.run_id]
        code = cli.main([*words, *where])
        out, said = capsys.readouterr()
        assert code == 0, (out, said)
        return out

    return call


def test_each_save_is_a_commit_in_the_journal_of_the_step_that_its_id_names(lab: Lab) -> None:
    commits = [c for c in lab.world.commits() if c.epoch < lab.epoch_of_the_killed]
    assert [c.step for c in commits] == [1, 2, 3, 4, 4, 5, 5, 6, 7]
    assert {c.reason for c in commits} == {SaveReason.REQUEST}
    assert [c.parent for c in commits] == [None, *(c.checkpoint_id for c in commits[:-1])]


def test_what_cannot_be_a_save_is_refused_by_name_and_the_next_save_is_good(lab: Lab) -> None:
    """None of them holds the next one up: a part that another rank has sealed is let go at once."""
    for found in lab.saved:
        assert found["waited"] == [True, True, True]
        assert found["mixed"].startswith("SaveFailed: step 7 is not committed")
        assert "float16" in found["mixed"]
        assert "ValueError: x [3] is on the meta device and cannot be saved" in found["meta"]
        assert found["copy"] == "RuntimeError: copy_all is broken"
        assert found["digest"] == (
            "SaveFailed: step 7 is not committed: rank 1: RuntimeError: of_staged is broken"
        )
        assert "bad cannot be stored without pickle: it holds a __main__.Held" in found["object"]
        assert "note' is a text with half a character at position 1" in found["half"]
        assert "the save names no step" in found["no step"]
        assert "step 5 is saved after step 6 (this attempt has committed)" in found["behind"]
        assert "checkpoint_id 'last' names no step" in found["no number"]
    assert "dcp.save ran on 1 of 2 ranks" in lab.saved[0]["one rank"]
    assert "all ranks of the attempt must save together" in lab.saved[1]["one rank"]


def test_a_killed_save_leaves_nothing_committed(lab: Lab) -> None:
    assert lab.killed[1] == -9
    assert [c.step for c in lab.world.commits() if c.epoch == lab.epoch_of_the_killed] == [8]


@pytest.mark.parametrize(("ranks", "step"), [(2, 2), (3, 3)])
def test_what_async_save_staged_is_loaded_bit_for_bit_on_any_number_of_ranks(
    lab: Lab, ranks: int, step: int
) -> None:
    for found in lab.finished("load", ranks, lab.world.commit_of(step)):
        assert found["loaded"] == lab.saved[0][f"step {step}"] == lab.saved[1][f"step {step}"]
        assert found["loaded"] != lab.saved[0]["step 1"]
        assert found["point"] == step
        assert "'step-9' is not the restore point of this attempt" in found["other"]
        assert found["by stored name"] == step
        for way in ("unloaded", "after a swallowed load"):
            assert "RestorePointNotLoaded: " in found[way]
            assert f"step {step + 1} is not saved: this attempt goes on from checkpoint" in found[way]
            assert lab.world.commit_of(step).checkpoint_id in found[way]
        assert "Missing key in checkpoint state_dict: more" in found["swallowed"]
        if ranks == 3:  # in two calls; the second one reads what the first one has left
            assert found["in part"].startswith(f"RestorePointNotLoaded: step {step + 1} is not saved")
            assert "dcp.load has read it in part" in found["in part"]
            assert "optimizer." in found["in part"]
            assert "SidecarReader(partial=True)" in found["in part"]
            assert "model." not in found["in part"]
        assert f"step {step - 1} is saved after step {step} (" in found["from scratch"]
    assert (
        max(c.epoch for c in lab.world.commits()) == lab.epoch_of_the_killed
    )  # no attempt after it has saved


def test_the_commands_list_verify_and_export_it(lab: Lab, rtj: Rtj, tmp_path: Path) -> None:
    point = lab.world.commit_of(2)
    listed = json.loads(rtj("checkpoints", "list", "--output", "json"))
    assert {(row["checkpoint"], row["step"]) for row in listed} >= {(point.checkpoint_id, 2)}
    assert "2" in rtj("checkpoints", "verify", point.checkpoint_id, "--deep")
    rtj("export", point.checkpoint_id, "--to", str(tmp_path / "model"))
    with safe_open(str(tmp_path / "model" / "tensors.safetensors"), framework="pt") as file:
        names = set(file.keys())
    assert names == {name.removeprefix("/model/") for name in lab.saved[0]["step 2"] if "/model/" in name}


def test_a_corrupted_shard_is_refused_by_name_and_accused_as_a_sessions_restore_does(lab: Lab) -> None:
    point = lab.world.commit_of(1)
    shard = lab.world.root / "store" / KEYS.shard(point.checkpoint_id, 1)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    found = lab.finished("bad", 2, point)
    for rank in found:
        assert "CheckpointRefused: ChecksumMismatch" in rank["refused"]
        assert "rank-00001.distcp" in rank["refused"]
        assert "RestorePointNotLoaded" in rank["swallowed"]
    plan = Plan.model_validate_json(lab.world.plan_file.read_bytes())
    outcomes = [
        Outcome.model_validate_json(path.read_bytes())
        for path in lab.world.volume.outcome_dir(plan.epoch).glob("rank-*.json")
    ]
    assert {o.kind for o in outcomes} == {OutcomeKind.RESUME_REFUSED}
    fault = parse_restore_fault(outcomes[0].message, point.checkpoint_id)
    assert fault is not None
    assert fault.checkpoint_id == point.checkpoint_id

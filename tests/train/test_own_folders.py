"""Folders that a framework has written, committed and given back: forked ranks, real sidecar, real store."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from in_process import Parts, rank_of
from rank_world import KEYS, ROOT, RankWorld, topology
from warm_ranks import WarmRanks, tail

from trainer_sidecar import cli
from trainer_sidecar.contract.journal import RestorePoint, SaveReason
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, Plan, WhenBusy
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.contract.restore_fault import parse_restore_fault
from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.dcp import CheckpointRefused, SidecarReader
from trainer_sidecar.train import (
    FolderRefused,
    FolderSession,
    FolderUnusable,
    ResumeRefused,
    SaveFailed,
    TrainingLibraryError,
    folder_migration,
    folder_restore,
    folder_session,
    folder_sharing,
)
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.folder_files import MARKER, FoundFile, check_path, found_files, make_ready, told
from trainer_sidecar.train.folder_migration import Migration
from trainer_sidecar.train.folder_restore import RestoredFolder
from trainer_sidecar.train.folder_sharing import dealt, meet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Rtj = Callable[..., tuple[int, str, str]]
MODEL = bytes(range(256)) * 40_000


class Lab:
    """One run. In its first attempt two ranks save twice; the second is killed in the third save."""

    def __init__(self, root: Path) -> None:
        self.world, self.warm = RankWorld(root / "run"), WarmRanks(root)
        self.saving = self.world.attempt(topology(2, 8, micro=4), checkpoint=policy(interval=2))
        self.world.out.mkdir()
        self.killed = self.run(self.saving, "save")

    def run(self, plan: Plan, mode: str) -> list[int]:
        return self.warm.run(self.world, plan, "own_folder_rank.py", FOLDER_MODE=mode)

    def read(self, name: str) -> list[dict[str, Any]]:
        paths = [self.world.out / f"{name}-{rank}.json" for rank in range(2)]
        return [json.loads(path.read_text()) for path in paths]


def policy(interval: int = 0) -> CheckpointPolicy:
    return CheckpointPolicy(interval_steps=interval, interval_seconds=0, when_busy=WhenBusy.WAIT)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("folders"))
    yield made
    made.warm.close()
    made.world.close()


@pytest.fixture
def rtj(lab: Lab, capsys: pytest.CaptureFixture[str]) -> Rtj:
    def call(*words: str) -> tuple[int, str, str]:
        where = ["--store", lab.world.store.url, "--namespace", KEYS.namespace, "--run-id", KEYS.run_id]
        code = cli.main([*words, *where])
        return code, *capsys.readouterr()

    return call


def alone(lab: Lab, restore: RestorePoint | None = None) -> Plan:
    return lab.world.attempt(topology(1, 8, micro=4), restore, checkpoint=policy())


def handed_out(
    lab: Lab, point: RestorePoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RestoredFolder, ResumeReport]:
    """The files of all ranks, in an attempt of one."""
    with (
        rank_of(lab.world, alone(lab, point), monkeypatch),
        FolderSession.from_env(device="cpu") as session,
    ):
        restored = session.restore_folder(folder, all_ranks=True)
    assert restored is not None
    assert session.resume is not None
    return restored, session.resume


def test_each_folder_is_a_commit_and_a_rank_that_dies_before_its_seal_leaves_none(lab: Lab) -> None:
    commits = lab.world.commits()
    assert [(c.step, c.samples, c.reason) for c in commits[:2]] == [
        (1, 8, SaveReason.REQUEST),
        (2, 16, SaveReason.INTERVAL),
    ]
    assert lab.killed[1] == -9, tail(lab.world, lab.saving)
    assert 3 not in [c.step for c in commits]
    for found in lab.read("found"):
        assert found["due"] == [False, True]
        assert re.match(
            r"FolderRefused: rank 1: \S+/own-1/way out is a link to '/etc/hostname'", found["link"]
        )
        assert "which restore_folder fills, lie in each other" in found["restored"]
        assert "step 1 is committed after step 2" in found["older"]
        assert "rank 1 and rank 0 see different files in one folder" in found["not one"]


def test_the_ranks_that_saved_get_their_folders_back_one_for_all_or_each_its_own(lab: Lab) -> None:
    for step in (1, 2):
        plan = lab.world.attempt(topology(2, 8, micro=4), lab.world.commit_of(step), checkpoint=policy())
        assert lab.run(plan, "load") == [0, 0], tail(lab.world, plan)
        for rank, found in enumerate(lab.read(f"loaded-{step}")):
            assert (found["step"], found["samples"]) == (step, 8 * step)
            where = {"0": "again"} if step == 1 else {str(rank): f"again-{rank}"}
            assert found["folders"] == {leader: str(lab.world.out / at) for leader, at in where.items()}
            if step == 1:
                assert found["work"] == "FolderRefused: rank 1: cannot be converted"
            if step == 2:
                assert "rank 0 and rank 1 each have a 'state' of their own" in found["both"]
            report = found["report"]
            assert not report["resharded"]
            assert report["derived"] == []
            assert report["checks"][0]["found"] == (5 if step == 1 else 2)
    again, shards = lab.world.out / "again", lab.world.out / "again" / "global_step1"
    assert {str(p.relative_to(again)) for p in again.rglob("*") if p.is_file()} == {
        ".rtj-restored.json",
        "latest",
        *(f"global_step1/zero_pp_rank_{rank}_optim_states.pt" for rank in range(2)),
        *(f"global_step1/{name}" for name in ("empty", "mp_rank_00_model_states.pt")),
    }
    assert (again / "latest").read_text() == "global_step1"
    assert (shards / "mp_rank_00_model_states.pt").read_bytes() == MODEL
    for rank in range(2):
        kept = (shards / f"zero_pp_rank_{rank}_optim_states.pt").read_bytes()
        assert kept == bytes([rank, 1]) * (300_000 * (rank + 1))
        assert (lab.world.out / f"again-{rank}" / "state").read_bytes() == b"own" * rank


def test_another_mesh_is_refused_unless_the_script_asks_for_all_ranks_files(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = alone(lab, lab.world.commit_of(2))
    with rank_of(lab.world, plan, monkeypatch):
        session = FolderSession.from_env(device="cpu")
        with pytest.raises(TrainingLibraryError, match=r"call restore_folder\(\) first"):
            session.step_end(3)
        with pytest.raises(ResumeRefused, match=r"on dp2xtp1xpp1.* this attempt has dp1xtp1xpp1"), session:
            session.restore_folder(tmp_path / "restored")
    outcome = lab.world.volume.outcome_dir(plan.epoch) / "rank-00000.json"
    assert Outcome.model_validate_json(outcome.read_bytes()).kind is OutcomeKind.RESUME_REFUSED
    assert not (tmp_path / "restored").exists()
    restored, report = handed_out(lab, lab.world.commit_of(2), tmp_path / "all", monkeypatch)
    assert report.resharded
    (derived,) = report.derived
    assert (
        "files of all 2 ranks (dp2xtp1xpp1/zero3) were handed out for the framework's own converter"
        in derived
    )
    assert restored.folders == {rank: tmp_path / "all" / f"rank-0000{rank}" for rank in range(2)}
    assert [(at / "state").read_bytes() for at in restored.folders.values()] == [b"", b"own"]


def test_sessions_and_dcp_refuse_such_a_checkpoint_by_name(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_of(lab.world, alone(lab, lab.world.commit_of(1)), monkeypatch):
        with pytest.raises(CheckpointRefused, match=r"only FolderSession\.restore_folder gives them back"):
            SidecarReader(device="cpu").read_metadata()
        with pytest.raises(ResumeRefused, match=r"only FolderSession\.restore_folder gives them back"):
            Parts().session(total_steps=1)


def test_the_commands_list_show_and_verify_it_and_export_refuses_it(
    lab: Lab, rtj: Rtj, tmp_path: Path
) -> None:
    point = lab.world.commit_of(1)
    code, out, _ = rtj("checkpoints", "list", "--output", "json")
    assert code == 0
    assert (point.checkpoint_id, 1) in {(row["checkpoint"], row["step"]) for row in json.loads(out)}
    for number, folders in ((1, "rank 0"), (2, "rank 0,rank 1")):
        code, out, _ = rtj("checkpoints", "show", lab.world.commit_of(number).checkpoint_id)
        assert code == 0
        assert re.search(rf"folders of: +{folders}\n", out), out
    assert rtj("checkpoints", "verify", point.checkpoint_id, "--deep")[0] == 0
    code, _, said = rtj("export", point.checkpoint_id, "--to", str(tmp_path / "model"))
    assert code == 2
    assert "holds folders that a framework has written" in said
    assert "all_ranks=True" in said
    assert not (tmp_path / "model").exists()


def test_one_changed_byte_is_refused_by_name_and_accused_as_a_sessions_restore_does(
    lab: Lab, rtj: Rtj, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = lab.world.commit_of(1)
    shard = lab.world.root / "store" / KEYS.shard(point.checkpoint_id, 0)
    good = shard.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    shard.write_bytes(bad)
    try:
        with pytest.raises(ResumeRefused, match="ChecksumMismatch") as refused:
            handed_out(lab, point, tmp_path / "restored", monkeypatch)
        assert KEYS.shard(point.checkpoint_id, 0) in str(refused.value)
        outcome = lab.world.volume.outcome_dir(lab.world.status()["epoch"]) / "rank-00000.json"
        assert parse_restore_fault(
            Outcome.model_validate_json(outcome.read_bytes()).message, point.checkpoint_id
        )
        code, out, _ = rtj("checkpoints", "verify", point.checkpoint_id, "--deep")
        assert code == 1
        assert "bytes: rank-00000.distcp" in out
    finally:
        shard.write_bytes(good)


def test_the_sample_of_the_page_goes_on_from_its_newest_commit_and_stops_on_order(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "own-folder.md").read_text()
    framework, sample = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    (tmp_path / "framework.py").write_text(framework)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    epochs = []
    for restore, ordered in ((None, True), (1, False)):
        point = lab.world.commit_of(restore) if restore else None
        plan = lab.world.attempt(topology(1, 8, micro=4), point, checkpoint=policy(interval=3))
        epochs.append(plan.epoch)
        order = lab.world.volume.order(plan.epoch)
        if ordered:
            order.parent.mkdir(parents=True, exist_ok=True)
            order.write_text("SaveAndExit")
        with rank_of(lab.world, plan, monkeypatch):
            exec(compile(sample, "own-folder.md", "exec"), {"__name__": "sample"})
        outcome = lab.world.volume.outcome_dir(plan.epoch) / "rank-00000.json"
        kind = Outcome.model_validate_json(outcome.read_bytes()).kind
        assert kind is (OutcomeKind.SAVED_AND_STOPPED if ordered else OutcomeKind.FINISHED)
    steps = [(c.epoch, c.step, c.reason) for c in lab.world.commits() if c.epoch in epochs]
    assert steps == [
        (epochs[0], 1, SaveReason.ORDER),
        (epochs[1], 3, SaveReason.INTERVAL),
        (epochs[1], 6, SaveReason.INTERVAL),
        (epochs[1], 8, SaveReason.REQUEST),
    ]
    assert not list((tmp_path / "saved").iterdir())


def test_a_folder_with_other_files_in_it_is_not_restored_into(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    point = lab.world.commit_of(2)
    with pytest.raises(ResumeRefused, match=r"has 'mine\.txt' in it, which no restore has put there"):
        handed_out(lab, point, tmp_path, monkeypatch)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    for _ in range(2):  # what a restore has put there, the next one takes away, also one that was killed
        handed_out(lab, point, tmp_path / "own", monkeypatch)
        (tmp_path / "own" / ".rtj-restored.json.new").write_text("{")
    assert [f.path for f in found_files(tmp_path / "own", ["rank-*"])] == []
    handed_out(lab, point, tmp_path / "own", monkeypatch)
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [
        ".rtj-restored.json",
        "rank-00000",
        "rank-00001",
    ]


def test_a_file_that_changes_while_it_is_copied_fails_the_save_by_name_and_the_next_one_is_good(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "saved" / "state.pt"
    state.parent.mkdir()
    state.write_bytes(b"1")
    look = folder_session.digest_of

    def late(files: list[FoundFile]) -> str:
        changes.pop(0)()
        return look(files)

    def put_back() -> None:
        seen = state.stat()
        state.write_bytes(b"2")
        os.utime(state, ns=(seen.st_atime_ns, seen.st_mtime_ns))

    shard = state.with_name("shard.pt")
    changes = [lambda: state.write_bytes(b"22"), put_back, lambda: shard.write_bytes(b"3"), shard.unlink]
    plan = alone(lab)
    with rank_of(lab.world, plan, monkeypatch), FolderSession.from_env(device="cpu") as session:
        with pytest.raises(
            TrainingLibraryError, match=r"has made a FolderSession already, .* to one FolderSession"
        ):
            FolderSession.from_env(device="cpu")
        with pytest.raises(FolderRefused, match="has no file in it, on no rank"):
            session.commit_folder(state.parent, step=1, ignore=["*.pt"])
        monkeypatch.setattr(folder_session, "digest_of", late)
        for said in (
            r"state\.pt was changed while it was being",
            r"state\.pt was changed while it was being",
            r"shard\.pt has come while the folder was being kept: commit a folder only when",
            r"shard\.pt (is gone while the folder was being|was listed, and cannot be read)",
        ):
            with pytest.raises(SaveFailed, match=r"step 1 is not committed: rank 0 gave up: \S+/" + said):
                session.commit_folder(state.parent, step=1, wait=True)
        assert not changes
        monkeypatch.setattr(folder_session, "digest_of", look)
        session.commit_folder(state.parent, step=1, wait=True)
    assert [c.step for c in lab.world.commits() if c.epoch == plan.epoch] == [1]


class Asked:
    """An agreement of one rank whose others have answered already; a list holds an answer for each round."""

    def __init__(self, *others: dict[str, str] | list[dict[str, str]]) -> None:
        self.others = [other if isinstance(other, list) else [other] for other in others]
        self.rounds = 0

    def gather(self, data: bytes) -> list[bytes]:
        answers = [other[min(self.rounds, len(other) - 1)] for other in self.others]
        self.rounds += 1
        return [data, *(json.dumps(answer).encode() for answer in answers)]


def test_each_file_of_a_folder_is_dealt_to_one_of_the_ranks_that_have_it() -> None:
    others = [{"key": key, "seen": key} for key in ("pod 0", "pod 1", "pod 1", "pod 0")]
    sharing = meet(cast("Agreement", Asked(*others)), lambda: ("pod 0", "pod 0"))
    assert sharing.leaders == (0, 0, 2, 2, 0)
    assert sharing.members(4) == [0, 1, 4]
    sizes = [900, 5, 0, 400, 500, 0, 3]
    shares = {r: dealt(list(enumerate(sizes)), [0, 1, 4], r, lambda f: f[1]) for r in (0, 1, 4)}
    assert sorted(file for share in shares.values() for file in share) == list(enumerate(sizes))
    assert all(sum(size for _, size in share) <= 900 for share in shares.values())
    with pytest.raises(FolderRefused, match="rank 1: no such folder"):
        meet(cast("Agreement", Asked({"refused": "no such folder"})), lambda: ("pod 0", "pod 0"))


def test_ranks_that_see_one_folder_otherwise_look_again_until_it_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client of a shared file system may hold an old listing for a while."""
    monkeypatch.setattr(folder_sharing, "_LOOK_SECONDS", 0.0)
    stale, fresh = {"key": "all", "seen": "old"}, {"key": "all", "seen": "new"}
    asked = Asked([stale, stale, fresh])
    looks = iter(["older", "new", "new"])
    assert meet(cast("Agreement", asked), lambda: ("all", next(looks)), 60).leaders == (0, 0)
    assert asked.rounds == 3
    with pytest.raises(FolderRefused, match="rank 1 and rank 0 see different files in one folder"):
        meet(cast("Agreement", Asked(stale)), lambda: ("all", "new"), 0)


def test_a_volume_that_is_full_is_no_refusal_wherever_it_is_met(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later attempt may find space; a refused resume would wait for somebody."""

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    point = lab.world.commit_of(2)
    for where, said in (
        ("make_ready", "No space left on device"),
        (
            "_copy",
            r"rank 0: \S+/_copy/rank-0000\d/\S+ cannot be written: No space left on device; the whole takes \d+ bytes, "
            r"\d+ are free now in \S+/_copy: free space there, or restore into a folder of another volume",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(folder_restore, where, full)
            with pytest.raises(FolderUnusable, match=said):
                handed_out(lab, point, tmp_path / where, monkeypatch)


CHANGE = Mesh(dp=2, zero=1), Mesh(dp=1, zero=1)


def rank_folders(root: Path, **latest: str) -> list[Path]:
    """One for each, with a shard of its own and a `latest`."""
    for name, text in latest.items():
        (root / name / "step-4").mkdir(parents=True)
        (root / name / "step-4" / f"{name}.pt").write_text(name)
        (root / name / "latest").write_text(text)
    return [root / name for name in latest]


def test_a_migration_gets_one_folder_with_the_files_of_all_pods_and_leaves_its_result_alone(
    tmp_path: Path,
) -> None:
    seen: list[str] = []

    def convert(source: Path, target: Path) -> None:
        seen.extend(file.path for file in found_files(source))
        assert not list(target.iterdir())
        (target / "universal").write_text("both")

    made = folder_migration.migrate(
        Migration("to-universal", convert, *CHANGE), tmp_path, rank_folders(tmp_path, a="step-4", b="step-4")
    )
    assert seen == ["latest", "step-4/a.pt", "step-4/b.pt"]
    assert (made.folder, made.files, made.bytes) == (tmp_path / "to-universal", 1, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["to-universal"]


def test_a_converter_may_move_or_remove_what_it_was_given(tmp_path: Path) -> None:
    def moves(source: Path, target: Path) -> None:
        source.rename(target / "all")

    def removes(source: Path, target: Path) -> None:
        shutil.copytree(source, target, dirs_exist_ok=True)
        shutil.rmtree(source)

    for number, (convert, found) in enumerate(((moves, "all/latest"), (removes, "latest"))):
        root = tmp_path / str(number)
        made = folder_migration.migrate(
            Migration("m", convert, *CHANGE), root, rank_folders(root, a="step-4")
        )
        assert (made.files, (root / "m" / found).read_text()) == (2, "step-4")
        assert [path.name for path in root.iterdir()] == ["m"]


def test_a_migration_that_cannot_be_trusted_is_refused_by_name(tmp_path: Path) -> None:
    def full(_: Path, __: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def ends(_: Path, __: Path) -> None:
        raise SystemExit(2)

    def linked_in(_: Path, target: Path) -> None:
        (target / "l").symlink_to("x")

    def linked_to(_: Path, target: Path) -> None:
        target.rmdir()
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")

    name = r"migration 'm' from dp2xtp1xpp1/zero1 to dp1xtp1xpp1/zero1"
    for number, (convert, error, said) in enumerate(
        (
            (ends, FolderRefused, name + r" failed: SystemExit: 2; its input lies in \S+/all-ranks: repair"),
            (lambda *_: None, FolderRefused, name + r" wrote no file into \S+/m: the converter gets"),
            (
                full,
                FolderUnusable,
                name
                + r" failed while it wrote into \S+/m: No space left on device; the whole takes 7 bytes, \d+ are",
            ),
        )
    ):
        root = tmp_path / str(number)
        with pytest.raises(error, match=said):
            folder_migration.migrate(Migration("m", convert, *CHANGE), root, rank_folders(root, a="step-4"))
        assert (root / "a" / "latest").exists(), "the input stays"
    for number, (convert, said) in enumerate(
        (
            (
                linked_in,
                name
                + r" has left what is not taken: \S+/m/l is a link to 'x': .* let the converter write files",
            ),
            (
                linked_to,
                name + r" has put a link in the place of \S+/m: the converter gets \(source, target\)",
            ),
            (lambda _, target: target.rmdir(), name + r" has removed \S+/m: the converter gets"),
        )
    ):
        root = tmp_path / f"left-{number}"
        with pytest.raises(FolderRefused, match=said) as refused:
            folder_migration.migrate(Migration("m", convert, *CHANGE), root, rank_folders(root, a="step-4"))
        assert "ignore=" not in str(refused.value), "restore_folder has no such argument"
        shutil.rmtree(root / "a")
        (root / MARKER).write_text(json.dumps({"files": [], "folders": ["all-ranks", "m"]}))
        make_ready(root, "000000000004-0000000001-0123abcd", [])  # the next attempt begins anew
        assert [path.name for path in root.iterdir()] == [MARKER]
    assert (tmp_path / "elsewhere").is_dir(), "what a link led to stays"
    root = tmp_path / "unlike"
    with pytest.raises(
        FolderRefused, match=r"'latest' of b is another file than that of the ranks before it"
    ):
        folder_migration.migrate(
            Migration("m", ends, *CHANGE), root, rank_folders(root, a="step-4", b="step-2")
        )
    for number, (first, then, said) in enumerate(
        (
            ("x", "x/y/z", "'x/y/z' of b lies in a folder that is a file of the ranks before it"),
            ("x/y", "x", "'x' of b is a file, and a folder of the ranks before it"),
        )
    ):
        root = tmp_path / f"kinds-{number}"
        for at in (root / "a" / first, root / "b" / then):
            at.parent.mkdir(parents=True)
            at.touch()
        with pytest.raises(FolderRefused, match=said):
            folder_migration.migrate(Migration("m", ends, *CHANGE), root, [root / "a", root / "b"])
    for wrong in ("../x", "rank-00000", "all-ranks", "", "Big"):
        with pytest.raises(ValueError, match="cannot name a migration"):
            folder_migration.check_names({wrong: ends})


def test_only_plain_files_below_the_folder_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(FolderRefused, match="is no folder"):
        found_files(folder)
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "c").write_bytes(b"123")
    (folder / "x").touch()
    assert [(f.path, f.size) for f in found_files(folder)] == [("a/b/c", 3), ("x", 0)]
    assert [f.path for f in found_files(folder, ["a"])] == ["x"]
    (folder / "a" / "up").symlink_to(tmp_path)
    with pytest.raises(FolderRefused, match=r"folder/a/up is a link to .*leave it out by ignore=\['a/up'\]"):
        found_files(folder)
    os.mkfifo(folder / "pipe")
    with pytest.raises(FolderRefused, match="folder/pipe is no file"):
        found_files(folder, ["a/up"])
    assert [f.path for f in found_files(folder, ["a/up", "p*"])] == ["a/b/c", "x"]


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b"])
def test_no_stored_name_leads_out_of_the_folder(path: str) -> None:
    with pytest.raises(FolderRefused, match="could lead out of the folder"):
        check_path(path)
    with pytest.raises(FolderRefused):
        told(f"folder/00000/{path}")

"""The staging buffer: who owns it when, what a full volume does, and that the copy is the state."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer_sidecar.contract.volume import BufferState
from trainer_sidecar.train import state_digest
from trainer_sidecar.train.capture import State
from trainer_sidecar.train.errors import StagingFailed
from trainer_sidecar.train.ownership import Planner
from trainer_sidecar.train.staging import Buffer, Stager, as_bytes


def trained() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = model[1](model[0](torch.randn(4, 5))).sum() + sum(p.sum() for p in model[2].parameters())
    loss.backward()
    optimizer.step()
    return State(model, [optimizer], {}, 1)


def soon() -> float:
    return time.monotonic() + 0.2


def test_the_staged_bytes_are_the_state(tmp_path: Path) -> None:
    state, stager = trained(), Stager(tmp_path / "rank-00000")
    captured = state.capture()
    plan = Planner(0, 1).plan(captured.entries)
    stager.stage(plan, captured, soon())
    raw = stager.buffer.path.read_bytes()
    for owned in plan.owned:
        piece = captured.pieces[owned.entry]
        assert raw[owned.offset : owned.offset + owned.length] == as_bytes(piece.local.contiguous()).tobytes()
    assert state_digest.of_staged(plan, stager.views(plan)) == state_digest.of_live(plan, captured)


def test_a_rank_that_owns_nothing_leaves_a_file_that_the_sidecar_can_open(tmp_path: Path) -> None:
    state, stager = trained(), Stager(tmp_path / "rank-00000")
    nothing = state.capture().only([])
    stager.stage(Planner(0, 1).plan(nothing.entries), nothing, soon())
    assert stager.buffer.path.is_file()


def test_a_later_step_reuses_buffer_views_and_plan(tmp_path: Path) -> None:
    state, stager, planner = trained(), Stager(tmp_path / "rank-00000"), Planner(0, 1)
    first = planner.plan(state.capture().entries)
    assert stager.stage(first, state.capture(), soon()) == 1
    views = stager.views(first)
    stager.buffer.mark(1, BufferState.FREE)
    with torch.no_grad():
        next(iter(state.model.parameters())).fill_(42.0)
    again = planner.plan(state.capture().entries)
    assert again is first
    assert stager.stage(again, state.capture(), soon()) == 2
    assert stager.views(again) is views
    assert (views[0] == 42.0).any()
    assert stager.buffer.control() == (2, BufferState.STAGING)


@pytest.mark.parametrize("held", [BufferState.SEALED, BufferState.UPLOADING])
def test_a_buffer_that_the_sidecar_still_reads_is_not_touched(tmp_path: Path, held: BufferState) -> None:
    state, stager = trained(), Stager(tmp_path / "rank-00000")
    captured = state.capture()
    plan = Planner(0, 1).plan(captured.entries)
    stager.stage(plan, captured, soon())
    before = stager.buffer.path.read_bytes()
    stager.buffer.mark(1, held)
    with torch.no_grad():
        next(iter(state.model.parameters())).fill_(42.0)
    with pytest.raises(StagingFailed, match=f"still {held.name}"):
        stager.stage(plan, state.capture(), soon())
    assert stager.buffer.path.read_bytes() == before


def test_a_new_attempt_takes_another_buffer_while_an_older_save_holds_the_first(tmp_path: Path) -> None:
    stager = Stager(tmp_path / "rank-00000")
    stager.buffer.mark(5, BufferState.UPLOADING)
    assert Stager(tmp_path / "rank-00000").buffer.name == "buffer-1"
    stager.buffer.mark(5, BufferState.STAGING)  # a trainer that died while copying
    assert Stager(tmp_path / "rank-00000").buffer.name == "buffer-0"


def test_a_full_volume_is_an_error_with_numbers_and_no_bus_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    state, stager = trained(), Stager(tmp_path / "rank-00000")
    captured = state.capture()
    plan = Planner(0, 1).plan(captured.entries)
    with pytest.raises(
        StagingFailed, match=rf"needs {plan.size} bytes .* are free: raise checkpoint.staging.size"
    ):
        stager.stage(plan, captured, soon())


def test_files_are_open_to_a_sidecar_of_another_user(tmp_path: Path) -> None:
    state, stager = trained(), Stager(tmp_path / "rank-00000")
    captured = state.capture()
    stager.stage(Planner(0, 1).plan(captured.entries), captured, soon())
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "rank-00000").iterdir()}
    assert modes == {"buffer-0": 0o666, "buffer-0.ctl": 0o666}
    assert (tmp_path / "rank-00000").stat().st_mode & 0o777 == 0o777


def test_a_control_block_that_was_made_and_never_written_is_none(tmp_path: Path) -> None:
    state, stager = trained(), Stager(tmp_path / "rank-00000")
    stager.buffer.path.with_suffix(".ctl").touch()  # killed between making the file and its first write
    assert stager.buffer.control() == (0, BufferState.FREE)
    captured = state.capture()
    stager.stage(Planner(0, 1).plan(captured.entries), captured, soon())
    assert stager.buffer.control()[0] == 1


def relaunched(folder: Path) -> Stager:
    """A new attempt's stager, in a volume where an older attempt's save still uploads out of buffer-0."""
    state, older = trained(), Stager(folder)
    captured = state.capture()
    older.stage(Planner(0, 1).plan(captured.entries), captured, soon())
    older.buffer.mark(1, BufferState.UPLOADING)
    return Stager(folder)


def test_a_buffer_that_became_free_before_the_first_save_is_taken(tmp_path: Path) -> None:
    state, stager = trained(), relaunched(tmp_path / "rank-00000")
    assert stager.buffer.name == "buffer-1"
    Buffer(tmp_path / "rank-00000", 0).mark(1, BufferState.FREE)
    captured = state.capture()
    generation = stager.stage(Planner(0, 1).plan(captured.entries), captured, soon())
    assert (stager.buffer.name, generation) == ("buffer-0", 2)
    assert not (tmp_path / "rank-00000" / "buffer-1").exists()


def test_without_room_for_a_second_buffer_saves_go_on_once_the_first_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, stager = trained(), relaunched(tmp_path / "rank-00000")
    captured = state.capture()
    plan, allocate = Planner(0, 1).plan(captured.entries), os.posix_fallocate
    inode = (tmp_path / "rank-00000" / "buffer-0").stat().st_ino

    def room_for_one(fd: int, offset: int, length: int) -> None:
        if os.fstat(fd).st_ino != inode:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", room_for_one)
    with pytest.raises(StagingFailed, match="are free"):
        stager.reserve(plan)
    with pytest.raises(StagingFailed, match="are free"):
        stager.stage(plan, captured, soon())
    Buffer(tmp_path / "rank-00000", 0).mark(1, BufferState.FREE)
    assert stager.stage(plan, captured, soon()) == 2
    assert stager.buffer.name == "buffer-0"


def test_the_bytes_of_a_buffer_that_is_free_and_not_used_are_given_back_and_its_generation_stays(
    tmp_path: Path,
) -> None:
    state, stager = trained(), relaunched(tmp_path / "rank-00000")
    captured, first = state.capture(), Buffer(tmp_path / "rank-00000", 0)
    plan = Planner(0, 1).plan(captured.entries)
    stager.stage(plan, captured, soon())
    assert stager.buffer.name == "buffer-1"
    assert first.path.exists(), "it still uploads"
    stager.buffer.mark(1, BufferState.FREE)
    first.mark(1, BufferState.FREE)
    stager.stage(plan, captured, soon())
    assert stager.buffer.name == "buffer-1", "mapped already: no reason to change"
    assert not first.path.exists()
    assert first.control() == (1, BufferState.FREE)


def test_a_buffer_whose_control_block_could_not_be_read_is_given_back_later(tmp_path: Path) -> None:
    """A look may meet the sidecar's write halfway; the bytes would fill the volume for the rest of the attempt."""
    state, stager = trained(), relaunched(tmp_path / "rank-00000")
    captured, first = state.capture(), Buffer(tmp_path / "rank-00000", 0)
    plan = Planner(0, 1).plan(captured.entries)
    control = tmp_path / "rank-00000" / "buffer-0.ctl"
    whole = control.read_bytes()
    control.write_bytes(whole[:-1])
    assert not first.usable()
    stager.stage(plan, captured, soon())
    assert first.path.exists()
    control.write_bytes(whole)
    first.mark(1, BufferState.FREE)
    stager.buffer.mark(1, BufferState.FREE)
    stager.stage(plan, captured, soon())
    assert not first.path.exists()


def test_after_a_save_that_could_not_be_staged_another_buffer_is_looked_for(tmp_path: Path) -> None:
    state, stager = trained(), Stager(tmp_path / "rank-00000")
    captured = state.capture()
    plan = Planner(0, 1).plan(captured.entries)
    stager.stage(plan, captured, soon())
    stager.buffer.mark(1, BufferState.UPLOADING)
    with pytest.raises(StagingFailed, match="still UPLOADING"):
        stager.stage(plan, captured, soon())
    stager.stage(plan, captured, soon())
    assert stager.buffer.name == "buffer-1"
    views = stager.views(plan)
    assert state_digest.of_staged(plan, views) == state_digest.of_live(plan, captured)

"""Folders in memory of runs that start at the same time: nobody loses the one it works in."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer_sidecar.run import local_volume
from trainer_sidecar.run.local_volume import LocalVolume, VolumeError, remove_abandoned

REAL = local_volume._lock


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked", "while it is removed"])
def test_a_new_folder_that_another_run_takes_for_abandoned_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another `rtj run` does its part at that moment, once."""
    removed: list[Path] = []
    held: list[int | None] = []
    real_flock, moments = fcntl.flock, [moment]

    def come(now: str) -> None:
        if now not in moments:
            return
        moments.clear()
        if moment == "while it is removed":
            held.extend(REAL(folder) for folder in tmp_path.iterdir())
        else:
            removed.extend(remove_abandoned(tmp_path))

    def lock(folder: Path) -> int | None:
        come("before it is opened")
        come("while it is removed")
        return REAL(folder)

    def flock(handle: int, operation: int) -> None:
        come("before it is locked")
        real_flock(handle, operation)

    monkeypatch.setattr(local_volume, "_lock", lock)
    monkeypatch.setattr(fcntl, "flock", flock)
    mine = LocalVolume(tmp_path)
    monkeypatch.undo()
    assert len(removed) + len(held) == 1
    for handle in held:
        assert handle is not None
        os.close(handle)
    mine.write_plan(b"{}")
    assert remove_abandoned(tmp_path) == []
    assert list(tmp_path.iterdir()) == [mine.root]
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_taken_again_and_again_end_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []

    def lock(folder: Path) -> int | None:
        with monkeypatch.context() as patch:
            patch.setattr(local_volume, "_lock", REAL)
            taken.extend(remove_abandoned(tmp_path))
        return REAL(folder)

    monkeypatch.setattr(local_volume, "_lock", lock)
    with pytest.raises(
        VolumeError, match=rf"10 new folders in {tmp_path}, the last one .* could not be locked"
    ):
        LocalVolume(tmp_path)
    assert len(set(taken)) == 10
    assert list(tmp_path.iterdir()) == []


def test_many_runs_that_start_together_all_keep_their_folders(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def start(_: int) -> LocalVolume:
        together.wait(30)
        return LocalVolume(tmp_path)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(25):
            volumes = list(pool.map(start, range(8)))
            assert remove_abandoned(tmp_path) == []
            assert sorted(tmp_path.iterdir()) == sorted(v.root for v in volumes)
            for volume in volumes:
                volume.write_plan(b"{}")
                volume.remove()
    assert list(tmp_path.iterdir()) == []

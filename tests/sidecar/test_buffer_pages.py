"""How a sealed buffer comes into the sidecar's memory: before it is hashed, without holding up other threads."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any, cast

import pytest

from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar import buffers
from trainer_sidecar.sidecar.buffers import RankStage

PAGE = mmap.PAGESIZE


class Mapping:
    """Notes what the kernel is asked for."""

    def __init__(self, size: int, refuses: int = 0) -> None:
        self._size, self._refuses = size, refuses
        self.asked: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self._size

    def madvise(self, _: int, start: int, length: int) -> None:
        self.asked.append((start, start + length))
        if self._refuses:
            raise OSError(self._refuses, "no")


def test_pages_are_mapped_in_pieces_that_cover_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call holds the interpreter's lock: of 64 GB at once it would, for seconds."""
    monkeypatch.setattr(buffers, "_MAPPED_AT_ONCE", 4 * PAGE)
    mapping = Mapping(9 * PAGE + 7)
    buffers._map_pages(cast("Any", mapping))
    assert mapping.asked == [(0, 4 * PAGE), (4 * PAGE, 8 * PAGE), (8 * PAGE, 9 * PAGE + 7)]


def test_a_kernel_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_MAPPED_AT_ONCE", PAGE)
    mapping = Mapping(9 * PAGE, errno.EINVAL)
    buffers._map_pages(cast("Any", mapping))
    assert len(mapping.asked) == 1


def test_the_pages_of_a_sealed_buffer_are_there_before_it_is_read(tmp_path: Path) -> None:
    size = 64 * PAGE + 1
    stage = RankStage(Volume(tmp_path), 0)
    stage.folder.mkdir(parents=True)
    (stage.folder / "buffer-0").write_bytes(bytes(size))
    probe = mmap.mmap(-1, PAGE)
    try:
        probe.madvise(buffers._MADV_POPULATE_READ)
    except OSError:
        pytest.skip("Linux before 5.14")
    seal: Any = type("Seal", (), {"buffer": "buffer-0", "size": size})
    with stage.bytes(seal) as view:
        assert resident(stage.folder / "buffer-0") == 65 * PAGE
        assert bytes(view) == bytes(size)


def resident(path: Path) -> int:
    """Bytes of the file in this process's page tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(1024 * int(text.split()[1]) for text in lines if text.startswith("Rss:"))
    raise AssertionError(f"{path} is not mapped")

"""Staging buffers as the sidecar sees them: control blocks, seals, the part made from them (datapath T6, protocol R7).

Ownership: FREE -> STAGING(g) -> SEALED(g) -> UPLOADING(g) -> FREE. The trainer writes STAGING and SEALED; only the
sidecar writes UPLOADING and FREE.
"""

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer_sidecar.contract.checkpoint import Part, Seal
from trainer_sidecar.contract.volume import (
    CONTROL_SIZE,
    MAX_SEAL_BYTES,
    BufferState,
    Volume,
    pack_control,
    unpack_control,
)
from trainer_sidecar.sidecar import workdir

_BUFFER = re.compile(r"^buffer-\d{1,4}$")
_RANK = re.compile(r"^rank-(\d{5})$")
_MADV_POPULATE_READ = 22
_MAPPED_AT_ONCE = 32 * 1024 * 1024


class RankStage:
    """The stage folder of one rank."""

    def __init__(self, volume: Volume, rank: int) -> None:
        self.rank = rank
        self.folder = volume.rank_stage(rank)
        self._root = volume.stage

    @property
    def part_file(self) -> Path:
        return self.folder / "part.json"

    @property
    def leaf_file(self) -> Path:
        return self.folder / "part.hash"

    def seal(self) -> Seal | None:
        """The newest seal, None when there is none. Raises ValueError when it cannot be one."""
        self._check_folder()
        try:
            seal = Seal.model_validate_json(workdir.read_file(self.folder / "seal.json", MAX_SEAL_BYTES))
        except FileNotFoundError:
            return None
        if not _BUFFER.match(seal.buffer):
            raise ValueError(
                f"seal of rank {self.rank} names buffer {seal.buffer!r}: expected buffer-<number>"
            )
        return seal

    def part(self) -> tuple[bytes, Part] | None:
        """The part made before a crash, verbatim and parsed; None when there is none that can be read."""
        try:
            data = workdir.read_file(self.part_file, 2 * MAX_SEAL_BYTES)
            return data, Part.model_validate_json(data)
        except (FileNotFoundError, ValueError):
            return None

    def control(self, buffer: str) -> tuple[int, BufferState]:
        """(generation, state). Raises ValueError when there is no control block."""
        try:
            handle = workdir.open_plain(self._control_path(buffer), os.O_RDONLY)
        except FileNotFoundError as exc:
            raise ValueError(f"{buffer} of rank {self.rank} has no control block") from exc
        try:
            data = os.pread(handle, CONTROL_SIZE, 0)
        finally:
            os.close(handle)
        if len(data) < CONTROL_SIZE:
            raise ValueError(
                f"control block of {buffer} of rank {self.rank} has {len(data)} of {CONTROL_SIZE} bytes"
            )
        return unpack_control(data)

    def set_control(self, buffer: str, generation: int, state: BufferState) -> None:
        handle = workdir.open_plain(self._control_path(buffer), os.O_WRONLY)
        try:
            os.pwrite(handle, pack_control(generation, state), 0)
        finally:
            os.close(handle)

    def free(self, buffer: str, generation: int) -> None:
        """FREE, unless the buffer has moved on to another generation."""
        if self.control(buffer)[0] == generation:
            self.set_control(buffer, generation, BufferState.FREE)

    def free_sealed(self, but: str = "") -> None:
        """Free every buffer that is sealed, without the one named `but`: their seal cannot be read, so no save takes
        their bytes, and nobody else knows which of them it was. A damaged control block is left as it is."""
        for buffer in self.buffers():
            with suppress(ValueError):
                generation, state = self.control(buffer)
                if state is BufferState.SEALED and buffer != but:
                    self.free(buffer, generation)

    def buffers(self) -> list[str]:
        """Names of buffers that have a control block."""
        return sorted(p.name[:-4] for p in self.folder.glob("buffer-*.ctl") if _BUFFER.match(p.name[:-4]))

    @contextmanager
    def bytes(self, seal: Seal) -> Iterator[memoryview]:
        """The sealed bytes, mapped and not copied. Raises ValueError when the buffer is missing or too short."""
        self._check_folder()
        try:
            handle = workdir.open_plain(self.folder / seal.buffer, os.O_RDONLY)
        except FileNotFoundError as exc:
            raise ValueError(f"{seal.buffer} of rank {self.rank} is gone") from exc
        try:
            size = os.fstat(handle).st_size
            if not 0 <= seal.size <= size:
                raise ValueError(f"seal of rank {self.rank} says {seal.size} bytes, {seal.buffer} has {size}")
            if seal.size == 0:
                yield memoryview(b"")
                return
            mapped = mmap.mmap(handle, seal.size, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        view = memoryview(mapped)
        try:
            _map_pages(mapped)
            yield view
        finally:
            _unmap(view, mapped)

    def _control_path(self, buffer: str) -> Path:
        return self.folder / f"{buffer}.ctl"

    def _check_folder(self) -> None:
        if self.folder.is_symlink() or self._root.is_symlink():
            raise ValueError(f"{self.folder} is a link: the sidecar does not follow links of the trainer")


def _map_pages(mapped: mmap.mmap) -> None:
    """All pages ahead: one by one, as they are hashed, they would cost as much as a copy. In pieces, since the call
    holds the interpreter's lock, 0.1 s per GB: nothing else of the sidecar would be answered meanwhile."""
    with suppress(OSError):  # Linux before 5.14 cannot
        for offset in range(0, len(mapped), _MAPPED_AT_ONCE):
            mapped.madvise(_MADV_POPULATE_READ, offset, min(_MAPPED_AT_ONCE, len(mapped) - offset))


def _unmap(view: memoryview, mapped: mmap.mmap) -> None:
    """Release the mapping now; while an exception still holds slices of it, the garbage collector does it later."""
    try:
        view.release()
        mapped.close()
    except BufferError:
        return


def stages(volume: Volume) -> list[RankStage]:
    """Stage folders on the volume, by rank."""
    found = [_RANK.match(p.name) for p in volume.stage.iterdir()] if volume.stage.is_dir() else []
    return [RankStage(volume, rank) for rank in sorted(int(m[1]) for m in found if m)]

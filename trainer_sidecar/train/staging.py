"""Copying a rank's own pieces into the shared volume: the only part of a save that blocks training.

One preallocated file per rank is reused (posix_fallocate, or a full volume would be a SIGBUS later: operator.md O24).
The control block beside it carries state and generation; the generation is bumped before the first store, so that a
sidecar that still hashes older bytes notices (datapath T6). Copies are one batched call over cached views (T3).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from trainer_sidecar.contract.volume import CONTROL_SIZE, BufferState, pack_control, unpack_control
from trainer_sidecar.train.capture import Captured
from trainer_sidecar.train.errors import StagingFailed
from trainer_sidecar.train.ownership import OwnershipPlan
from trainer_sidecar.train.shared_memory import plainly

_POLL_SECONDS = 0.02
_PAGE = 4096
_USABLE = (BufferState.FREE, BufferState.STAGING)


class Buffer:
    """One staging buffer `buffer-<k>` of a rank with its control block. The trainer writes STAGING and SEALED only."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = f"buffer-{number}"
        self.path, self._control = folder / self.name, folder / f"{self.name}.ctl"
        self._map: mmap.mmap | None = None
        self.bytes: torch.Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def capacity(self) -> int:
        return self.bytes.numel()

    def control(self) -> tuple[int, BufferState]:
        """(generation, state); (0, FREE) while there is no control block. Raises ValueError when it is damaged.

        An empty file is none: a rank was killed between making it and its first write.
        """
        try:
            data = self._control.read_bytes()[:CONTROL_SIZE]
        except FileNotFoundError:
            data = b""
        return unpack_control(data) if data else (0, BufferState.FREE)

    def usable(self) -> bool:
        """Whether no save holds it, as far as a look tells: it may meet a write halfway, or a damaged block."""
        try:
            return self.control()[1] in _USABLE
        except ValueError:
            return False

    def mark(self, generation: int, state: BufferState) -> None:
        """Write the control block in place, in one call."""
        fd = os.open(self._control, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(fd, pack_control(generation, state), 0)
        finally:
            os.close(fd)
        open_to_all(self._control)

    def reserve(self, size: int) -> None:
        """Map at least `size` bytes, all allocated. Raises StagingFailed when the volume is full."""
        if size <= self.capacity:
            return
        self.release()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            allocate(fd, size, self.path)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        open_to_all(self.path)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes.numpy()[::_PAGE] = (
            0  # fault pages in now: first stores cost 10 to 20 x memcpy (datapath T4)
        )

    def release(self) -> None:
        """Drop the mapping. The file stays, the sidecar may still read it."""
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._map = None


def allocate(fd: int, size: int, path: Path) -> None:
    """`size` bytes of an open file, really there. Raises StagingFailed when the volume is full."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        stats = os.statvfs(path)
        free = stats.f_bavail * stats.f_frsize
        raise StagingFailed(
            f"{path} needs {size} bytes of the shared volume, {free} are free: raise "
            "checkpoint.staging.size, or free memory there under rtj run"
        ) from error


def open_to_all(path: Path) -> None:
    """Trainer and sidecar often run under different users (operator.md O23)."""
    with contextlib.suppress(PermissionError):  # a file that another user made before is open already
        os.chmod(path, 0o666)


def open_folder(path: Path) -> None:
    """Make a folder that trainer and sidecar can both write."""
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):
        os.chmod(path, 0o777)


def write_by_rename(path: Path, data: bytes) -> None:
    """Complete or absent, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data)
    open_to_all(temporary)
    os.replace(temporary, path)


class Stager:
    """A rank's staging buffers and the views of the plan in them.

    One buffer is in use. Another one is chosen only when this process has none mapped, or could not stage into it: a
    buffer that an older save held at the start may be free by now (D7). Bytes of buffers not in use are given back.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        open_folder(folder)
        self._failed = False
        self.buffer = self._first_usable()
        self._alone = False
        """There are no bytes of another buffer to give back."""
        self._views: tuple[OwnershipPlan, list[torch.Tensor]] | None = None

    def _first_usable(self) -> Buffer:
        """The first buffer that no older save still holds. STAGING means that a trainer died while copying: take it."""
        for number in range(1000):
            buffer = Buffer(self.folder, number)
            if buffer.control()[1] in _USABLE:
                return buffer
        raise StagingFailed(f"1000 buffers in {self.folder} are held by older saves: see the sidecar's log")

    def _choose(self) -> None:
        """Another look for a buffer, unless the one in use is mapped and has not failed."""
        if self.buffer.capacity and not self._failed:
            return
        found = self._first_usable()
        if found.name != self.buffer.name:
            self.buffer.release()
            self.buffer, self._views, self._alone = found, None, False
        self._failed = False

    def _give_back(self) -> None:
        """Unlink the bytes of buffers that are free and not in use. Their control blocks stay: a generation that began
        again would let an old seal's upload free a buffer that is being written."""
        if self._alone:
            return
        alone = True
        for control in self.folder.glob("buffer-*.ctl"):
            number = control.stem.removeprefix("buffer-")
            if control.stem == self.buffer.name or not number.isdigit():
                continue
            other = Buffer(self.folder, int(number))
            if other.usable():
                other.path.unlink(missing_ok=True)
            else:
                alone = False
        self._alone = alone

    def reserve(self, plan: OwnershipPlan) -> None:
        """Allocate for `plan` ahead of the first save, outside the step (datapath T4)."""
        self._choose()
        self._give_back()
        if self.buffer.control()[1] in _USABLE:
            self._reserve(plan.size)
            self.views(plan)

    def _reserve(self, size: int) -> None:
        size = max(size, 1)  # where this rank owns nothing, the sidecar opens the file all the same
        if size > self.buffer.capacity:
            self._views = None
            self.buffer.reserve(size)

    def stage(self, plan: OwnershipPlan, captured: Captured, deadline: float) -> int:
        """Copy what `plan` owns out of the live tensors; returns the generation. Blocks only for the copy, unless an
        older save still holds the buffer: then until it is free. Raises StagingFailed after `deadline` (monotonic)."""
        self._choose()
        self._give_back()
        try:
            return self._stage(plan, captured, deadline)
        except StagingFailed:
            self._failed = True
            raise

    def _stage(self, plan: OwnershipPlan, captured: Captured, deadline: float) -> int:
        generation = self._wait_free(deadline)[0] + 1
        self.buffer.mark(generation, BufferState.STAGING)
        self._reserve(plan.size)
        self._fill(plan, captured)
        return generation

    def _fill(self, plan: OwnershipPlan, captured: Captured) -> None:
        sources = sources_of(plan, captured)
        try:
            copy_all(self.views(plan), sources)
        except Exception as error:  # which one it is depends on torch's build
            names = [plan.entries[piece.entry].name for piece in plan.owned]
            _name_the_empty(names, sources, error)
            raise

    def seal(self, generation: int) -> None:
        self.buffer.mark(generation, BufferState.SEALED)

    def held(self) -> bool:
        """Whether the sidecar has not freed the buffer yet."""
        return not self.buffer.usable()

    def views(self, plan: OwnershipPlan) -> list[torch.Tensor]:
        """The buffer's bytes as tensors, one per owned piece; cached with the plan."""
        if self._views is None or self._views[0] is not plan:
            base = self.buffer.bytes
            views = []
            for piece in plan.owned:
                dtype = getattr(torch, plan.entries[piece.entry].dtype)
                raw = base[piece.offset : piece.offset + piece.length]
                views.append(raw.view(dtype).view(piece.place.size))
            self._views = (plan, views)
        return self._views[1]

    def _wait_free(self, deadline: float) -> tuple[int, BufferState]:
        while (control := self.buffer.control())[1] not in _USABLE:
            if time.monotonic() > deadline:
                raise StagingFailed(
                    f"{self.buffer.path} is still {control[1].name} from the save before: the sidecar has not freed it"
                )
            time.sleep(_POLL_SECONDS)
        return control


@torch.no_grad()
def sources_of(plan: OwnershipPlan, captured: Captured) -> list[torch.Tensor]:
    """The live pieces that `plan` owns, in its order; views, nothing is copied."""
    sources = []
    for piece in plan.owned:
        local = captured.pieces[piece.entry].local
        if piece.local.size != local.shape:
            local = local[
                tuple(slice(a, a + n) for a, n in zip(piece.local.start, piece.local.size, strict=True))
            ]
        sources.append(local)
    return sources


@torch.no_grad()
def copy_all(views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Each source into its view on the host, in one batched call; done when it returns."""
    on_gpu = [i for i, s in enumerate(sources) if not s.is_cpu]
    if on_gpu:
        _copy_from_gpu([views[i] for i in on_gpu], [sources[i] for i in on_gpu])
        on_cpu = [i for i, s in enumerate(sources) if s.is_cpu]
        views, sources = [views[i] for i in on_cpu], [sources[i] for i in on_cpu]
    if sources:
        with _one_thread():
            torch._foreach_copy_(views, sources)


def _name_the_empty(names: list[str], sources: list[torch.Tensor], error: Exception) -> None:
    """Raises ValueError for a tensor that has no memory which could be copied: torch does not say which."""
    for name, source in zip(names, sources, strict=True):
        if source.is_meta or source.layout is not torch.strided:
            kind = "on the meta device" if source.is_meta else str(source.layout)
            raise ValueError(
                f"{name} {list(source.shape)} is {kind} and cannot be saved: give it memory (to_empty, to_dense), or "
                "leave it out of what is saved"
            ) from error


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """What was begun on tensors that are not on the host is done: other threads have streams of their own."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _copy_from_gpu(views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies on a side stream that waits for the step's kernels; returns when the bytes are in the buffer.

    Blocking for the copy keeps the snapshot whole without fences in the user's loop (datapath T7).
    """
    stream = torch.cuda.Stream(sources[0].device)
    stream.wait_stream(torch.cuda.current_stream(sources[0].device))
    with torch.cuda.stream(stream):
        for view, source in zip(views, sources, strict=True):
            view.copy_(source, non_blocking=True)
    stream.synchronize()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Two intra-op threads on busy cores made the copy 3 to 5 times slower (datapath T3)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_bytes(view: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor's bytes, uint8; no copy, unless it is conjugated or negated."""
    return plainly(view.detach()).reshape(-1).view(torch.uint8).numpy()

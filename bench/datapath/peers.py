"""What else writes a checkpoint, and is installed beside us: to memory, and then the files to the store.

None of them hashes what it reads back, commits conditionally, or survives a rank that dies in between.
"""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from raw import Bucket
from torch import nn

Write = Callable[[Path], object]


def _file_system_writer(model: nn.Module, _: Path) -> Write:
    return lambda folder: dcp.save({"model": model.state_dict()}, checkpoint_id=str(folder))


def _torch_save(model: nn.Module, _: Path) -> Write:
    return lambda folder: torch.save({"model": model.state_dict()}, folder / "model.pt")


def _save_state(model: nn.Module, _: Path) -> Write:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    return lambda folder: accelerator.save_state(str(folder))


KINDS: dict[str, Callable[[nn.Module, Path], Write]] = {
    "DCP FileSystemWriter": _file_system_writer,
    "torch.save": _torch_save,
}
if importlib.util.find_spec("accelerate"):
    KINDS["Accelerate save_state"] = _save_state


def upload_folder(store: Bucket, name: str, folder: Path) -> int:
    """Bytes of its files, all sent by plain multipart."""
    sent = 0
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size):
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            store.upload_seconds(f"peer/{name}/{path.relative_to(folder)}", view)
            sent += len(view)
    return sent

"""Real text that every machine has: the sources of Python's standard library, cut into windows of bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class StandardLibrary(Dataset[Tensor]):
    """Item i is window i: int64 tensor of shape (context + 1,), inputs and targets one byte apart."""

    def __init__(self, context: int = 128, limit: int = 4_000_000) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:limit]
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.bytes[start : start + self.context + 1].long()

"""Text in windows of tokens: a file, or, for `python`, sources of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Windows(Dataset[Tensor]):
    """Item i is window i: int64 tensor of shape (context,)."""

    def __init__(self, name: str, tokenizer, context: int, limit: int = 400_000) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("a*.py")) if name == "python" else [Path(name)]
        text = "".join(path.read_text() for path in files)[:limit]
        self.tokens = torch.tensor(tokenizer(text)["input_ids"])
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index * self.context : (index + 1) * self.context]

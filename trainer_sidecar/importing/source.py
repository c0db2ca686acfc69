"""Files with tensors in them, as an import sees them, and the taking off of a prefix of their names."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from trainer_sidecar.store.merge import ITEM_SIZE


class UnfitSourceError(ValueError):
    """What cannot be imported; the message names file or tensor, what was found, and what to do."""


@dataclass(frozen=True)
class Piece:
    """A block of a tensor of global `shape`: `start` and `size` in elements by dimension, `offset` in bytes in its
    file, little-endian and C-contiguous."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int

    @property
    def length(self) -> int:
        """Bytes."""
        return prod(self.size) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class SourceFile:
    """A file and the pieces that lie in it."""

    path: Path
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Source:
    """What is imported. `others`: entries that are no tensors, by name."""

    format: Literal["huggingface", "dcp"]
    files: tuple[SourceFile, ...]
    others: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return {piece.tensor for file in self.files for piece in file.pieces}

    def below(self, prefix: str) -> "Source":
        """Only what is named `prefix…`, without it. Raises UnfitSourceError when that is nothing, or no tensors."""
        files = [SourceFile(f.path, tuple(_stripped(f.pieces, prefix))) for f in self.files]
        chosen = Source(
            self.format,
            tuple(f for f in files if f.pieces),
            tuple(name for name in self.others if name.startswith(prefix)),
        )
        if not chosen.files:
            shown = ", ".join(sorted(self.names)[:3]) or "no tensor at all"
            raise UnfitSourceError(f"no tensor is named {prefix}…: there is {shown}")
        if chosen.others:
            raise UnfitSourceError(
                f"{chosen.others[0]} is no tensor (one of {len(chosen.others)} such entries), and weights alone can be "
                "imported: name the part that is the model by --strip PREFIX, as --strip model."
            )
        return chosen


def _stripped(pieces: Iterable[Piece], prefix: str) -> Iterable[Piece]:
    for piece in pieces:
        if piece.tensor.startswith(prefix):
            yield dataclasses.replace(piece, tensor=piece.tensor.removeprefix(prefix))

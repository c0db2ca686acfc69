"""Files with tensors in them, as an import sees them, and the taking off of a prefix of their names."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Literal

from trainer_sidecar.store.merge import ITEM_SIZE
from trainer_sidecar.store.overlap import Cover

_MOST_ELEMENTS = 2**63 - 1
"""What torch can count, in a tensor without elements as well."""


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

    def check(self) -> None:
        """Raises UnfitSourceError where these tensors can be no checkpoint: as a commit would, before anything is
        stored."""
        covers: dict[str, tuple[Piece, Cover]] = {}
        for file in self.files:
            _check_bytes(file)
            for rank, piece in enumerate(file.pieces):
                _check_piece(file, piece)
                first, cover = covers.setdefault(piece.tensor, (piece, Cover(piece.shape)))
                if (first.dtype, first.shape) != (piece.dtype, piece.shape):
                    raise UnfitSourceError(
                        f"{file.path}: {piece.tensor} is {piece.dtype}{list(piece.shape)} here and "
                        f"{first.dtype}{list(first.shape)} elsewhere"
                    )
                if cover.add((piece.start, piece.size, rank)):
                    raise UnfitSourceError(
                        f"{file.path}: {piece.tensor} at {list(piece.start)} is there twice"
                    )
        for name, (first, cover) in covers.items():
            if cover.overlap() or cover.held != prod(first.shape):
                raise UnfitSourceError(
                    f"{name} of shape {list(first.shape)} has {prod(first.shape)} elements, and its pieces hold "
                    f"{cover.held}: the files are no whole checkpoint"
                )

    def below(self, prefix: str) -> "Source":
        """Only what is named `prefix…`, without it. Raises UnfitSourceError when that is nothing, no tensors, or
        no whole checkpoint."""
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
        chosen.check()
        return chosen


def _stripped(pieces: Iterable[Piece], prefix: str) -> Iterable[Piece]:
    for piece in pieces:
        if piece.tensor.startswith(prefix):
            yield dataclasses.replace(piece, tensor=piece.tensor.removeprefix(prefix))


def _check_piece(file: SourceFile, piece: Piece) -> None:
    try:
        piece.tensor.encode()
    except UnicodeEncodeError as exc:
        raise UnfitSourceError(
            f"{file.path}: the name {piece.tensor!r} is no text that can be stored ({exc.reason}): rename the tensor"
        ) from exc
    if prod(max(n, 1) for n in piece.shape) > _MOST_ELEMENTS:
        raise UnfitSourceError(
            f"{file.path}: {piece.tensor} has shape {list(piece.shape)}, more than the {_MOST_ELEMENTS} elements that "
            "can be counted"
        )
    inside = len(piece.start) == len(piece.size) == len(piece.shape) and all(
        a >= 0 and n >= 0 and a + n <= whole
        for a, n, whole in zip(piece.start, piece.size, piece.shape, strict=True)
    )
    if not inside:
        raise UnfitSourceError(
            f"{file.path}: {piece.tensor} at {list(piece.start)}, size {list(piece.size)}, leaves its shape "
            f"{list(piece.shape)}"
        )


def _check_bytes(file: SourceFile) -> None:
    """No byte belongs to two tensors."""
    used = sorted((p.offset, p.offset + p.length, p.tensor) for p in file.pieces if p.length)
    for (_, end, tensor), (begin, _, other) in pairwise(used):
        if begin < end:
            raise UnfitSourceError(
                f"{file.path}: {tensor} ends at byte {end} and {other} begins at {begin}: two tensors share bytes; "
                "save them apart"
            )

"""Sequences of one length made of documents of any length, in an order that no number of ranks changes.

Algorithm `rtj-pack-1`, fixed for ever once released:

* Documents come in the order of the data below (`rtj-order-1`, or a mixture). The p-th sequence of the run is made
  from where the one before ended, so sequences, not documents, fill the global batch.
* `split`: documents are laid end to end and cut every `length` tokens; no token is dropped and none is padding.
* Not `split`: a sequence takes whole documents until the next one does not fit, and is padded.

Packing needs lengths, not tokens: every rank follows the lengths of all documents and reads those of its own sequences
only. What is left over between two sequences is no buffer of tokens but a place (document, offset), a few numbers
equal on all ranks. They are saved with the progress, so a resume on any number of ranks goes on at that very token.

The digest of consumed samples is made of pieces (document, first token, end), so it proves what was read to the token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trainer_sidecar.train.mixture import INDEX_BITS, INDEX_MASK, Mixture
from trainer_sidecar.train.order import Order

ALGORITHM = "rtj-pack-1"
PADDING = -1
_AHEAD = 256
_MOST_EMPTY = 10_000

Piece = tuple[int, int, int]
"""Document, first token, end: tokens [first, end) of it."""


Lengths = Sequence[int] | np.ndarray | Callable[[np.ndarray], np.ndarray]
"""Tokens of documents: by index, or as a function of an int64 array of ids."""


class Packed:
    """Give it to `Session.from_env(data=…)`; a sample is then a dict of two int64 tensors of `length` elements:
    `input_ids`, and `segments`, the number of the document within the sequence (-1: padding), to mask attention with.

    `documents` is a map-style dataset of token sequences, or a `Mixture` of such. `lengths` are their tokens:
    an array by index (of a `Mixture`: by dataset, `{name: array}`), or a function from an int64 array of ids to one of
    lengths; without it every rank reads every document of the global batch only to measure it. Raises ValueError for a
    length below 1, and for `lengths` that do not fit the documents.
    """

    def __init__(
        self,
        documents: Any,
        length: int,
        *,
        lengths: Lengths | Mapping[str, Sequence[int] | np.ndarray] | None = None,
        split: bool = True,
        padding: int = 0,
    ) -> None:
        if length < 1:
            raise ValueError(f"packed sequences of {length} tokens: at least 1 is needed")
        self.documents, self.length, self.split, self.padding = documents, length, split, padding
        self._lengths = lengths if lengths is None or callable(lengths) else _by_id(documents, lengths)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of these documents, int64. Raises ValueError when one is negative, or longer than a sequence that
        takes whole documents."""
        if self._lengths is not None:
            found = np.asarray(self._lengths(ids), dtype=np.int64)
        else:
            found = np.array([len(self.documents[i]) for i in ids.tolist()], dtype=np.int64)
        wrong = np.flatnonzero((found < 0) | ((found > self.length) & (not self.split)))
        if wrong.size:
            document, tokens = int(ids[wrong[0]]), int(found[wrong[0]])
            raise ValueError(
                f"document {document} has {tokens} tokens, a sequence takes {self.length}: use split=True, or cut "
                "long documents before"
            )
        return found

    def __getitems__(self, sequences: Sequence[tuple[Piece, ...]]) -> list[dict[str, torch.Tensor]]:
        """Sequences by their pieces; the session asks for these."""
        return [self[pieces] for pieces in sequences]

    def __getitem__(self, pieces: tuple[Piece, ...]) -> dict[str, torch.Tensor]:
        """One sequence. Raises ValueError when a document has another length than `lengths` said."""
        tokens = torch.full((self.length,), self.padding, dtype=torch.int64, device="cpu")
        segments = torch.full((self.length,), PADDING, dtype=torch.int64, device="cpu")
        at = 0
        for number, (document, first, end) in enumerate(pieces):
            found = torch.as_tensor(self.documents[document], dtype=torch.int64, device="cpu")[first:end]
            if len(found) != end - first:
                raise ValueError(
                    f"document {document} ends before token {end}: `lengths` does not fit the documents, make both anew"
                )
            tokens[at : at + len(found)], segments[at : at + len(found)] = found, number
            at += len(found)
        return {"input_ids": tokens, "segments": segments}


def _by_id(
    documents: Any, lengths: Sequence[int] | np.ndarray | Mapping[str, Sequence[int] | np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    """Lengths as a function of ids. Raises ValueError when there is not one for each document."""
    if not isinstance(documents, Mixture):
        if isinstance(lengths, Mapping):
            raise ValueError(
                "lengths by name need a Mixture: give an array with one length for each document"
            )
        return _checked("the data", lengths, len(documents)).__getitem__
    if not isinstance(lengths, Mapping) or lengths.keys() != set(documents.names):
        found = f"names {sorted(lengths)}" if isinstance(lengths, Mapping) else "one array"
        raise ValueError(
            f"lengths of a Mixture go by dataset, an id is no index there: {found} given, give an array for each of "
            f"{', '.join(documents.names)}, as in lengths={{{documents.names[0]!r}: ...}}, or a function of ids"
        )
    arrays = [_checked(n, lengths[n], s) for n, s in zip(documents.names, documents.sizes, strict=True)]
    starts = np.cumsum([0, *documents.sizes[:-1]])
    every = np.concatenate(arrays)
    return lambda ids: every[starts[ids >> INDEX_BITS] + (ids & INDEX_MASK)]


def _checked(name: str, lengths: Sequence[int] | np.ndarray, documents: int) -> np.ndarray:
    found = np.asarray(lengths)
    if found.shape != (documents,):
        raise ValueError(
            f"lengths of {name} have shape {found.shape}, its documents are {documents}: one length for each is needed"
        )
    return found


@dataclass(frozen=True)
class _Place:
    """Where a sequence begins: `document` counts positions of the order below, `offset` its tokens already used."""

    document: int = 0
    offset: int = 0


class PackedOrder(Order):
    """Order of the packed sequences over `below`, the order of the documents.

    Sequences are made one after the other, so positions before the last `passed` one are gone.
    """

    samples_per_epoch = 0

    def __init__(self, packed: Packed, below: Order) -> None:
        self._packed, self._below = packed, below
        self._first = 0
        self._made: deque[tuple[_Place, tuple[Piece, ...]]] = deque()
        self._next = _Place()
        self._known: tuple[int, np.ndarray, np.ndarray] = (0, np.empty(0, np.int64), np.empty(0, np.int64))

    def epoch(self, position: int) -> int:
        """Epoch of the first document of a sequence."""
        return self._below.epoch(self._place(position).document)

    def ids(self, position: int, count: int) -> np.ndarray:
        """Numbers of the sequences: their positions, int64."""
        return np.arange(position, position + count, dtype=np.int64)

    def items(self, position: int, count: int) -> list[tuple[Piece, ...]]:
        """The pieces of each sequence."""
        self._make(position + count)
        at = position - self._first
        assert at >= 0, f"sequence {position} was consumed, {self._first} is the first one that is kept"
        return [self._made[i][1] for i in range(at, at + count)]

    def words(self, position: int, count: int) -> np.ndarray:
        """All pieces of these sequences, each sequence ended by -1; int64."""
        flat = [
            word for pieces in self.items(position, count) for word in (*(w for p in pieces for w in p), -1)
        ]
        return np.array(flat, dtype=np.int64)

    def passed(self, position: int) -> None:
        """Forget the sequences before `position`."""
        self._make(position)
        while self._first < position:
            self._made.popleft()
            self._first += 1

    def state(self, position: int) -> dict[str, Any]:
        """The place where the sequence at `position` begins."""
        place = self._place(position)
        return {"document": place.document, "offset": place.offset}

    def resume(self, position: int, state: Mapping[str, Any] | None) -> None:
        """Go on at a place that `state` returned for `position`."""
        assert state is not None
        self._first, self._next = position, _Place(int(state["document"]), int(state["offset"]))
        self._made.clear()

    def counts(self, position: int) -> dict[str, dict[str, int]]:
        """Of the documents that ended before `position`."""
        document = self._place(position).document
        whole = {"documents": {"samples": document, "epoch": self._below.epoch(document)}}
        return self._below.counts(document) or whole

    def pieces(self, ids: Sequence[int]) -> list[list[list[int]]]:
        """[document, first token, end] of each piece of these sequences."""
        return [[list(piece) for piece in self.items(number, 1)[0]] for number in ids]

    def names(self) -> list[str]:
        """Of the datasets below."""
        return self._below.names()

    def describe(self) -> dict[str, Any]:
        """What must be equal for a cursor to mean the same tokens."""
        own = {"packing": ALGORITHM, "length": self._packed.length, "split": self._packed.split}
        return {**self._below.describe(), **own}

    def _place(self, position: int) -> _Place:
        self._make(position)
        at = position - self._first
        assert at >= 0, f"sequence {position} was consumed, {self._first} is the first one that is kept"
        return self._made[at][0] if at < len(self._made) else self._next

    def _make(self, end: int) -> None:
        while self._first + len(self._made) < end:
            pieces, after = self._pack(self._next)
            self._made.append((self._next, pieces))
            self._next = after

    def _pack(self, place: _Place) -> tuple[tuple[Piece, ...], _Place]:
        """One sequence from `place` on, and the place after it."""
        pieces: list[Piece] = []
        room, empty = self._packed.length, 0
        while room:
            document, tokens = self._document(place.document)
            left = tokens - place.offset
            if left > room and not self._packed.split:
                break
            taken = min(left, room)
            if taken:
                pieces.append((document, place.offset, place.offset + taken))
            room -= taken
            place = (
                _Place(place.document + 1) if taken == left else replace(place, offset=place.offset + taken)
            )
            empty = 0 if taken else empty + 1
            if empty > _MOST_EMPTY:
                raise ValueError(
                    f"{empty} documents without a token in a row, {document} the last: nothing to pack"
                )
        return tuple(pieces), place

    def _document(self, position: int) -> tuple[int, int]:
        """Id and tokens of a document; read `_AHEAD` at a time."""
        first, ids, lengths = self._known
        if not first <= position < first + len(ids):
            ids = self._below.ids(position, _AHEAD)
            first, lengths = position, self._packed.lengths(ids)
            self._known = (first, ids, lengths)
        return int(ids[position - first]), int(lengths[position - first])

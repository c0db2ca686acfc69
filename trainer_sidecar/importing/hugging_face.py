"""A model folder of Hugging Face: `model.safetensors`, or several files with their index. Headers are read, no tensors.

Format: https://huggingface.co/docs/safetensors (header length as u64, little-endian, a JSON header, the bytes).
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from trainer_sidecar.export.safetensors_file import DTYPES
from trainer_sidecar.importing.source import Piece, Source, SourceFile, UnfitSourceError
from trainer_sidecar.store.merge import ITEM_SIZE

_NAMES = {code: name for name, code in DTYPES.items()}
_MAX_HEADER = 100 * 1024 * 1024
"""As in the format's own reader."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read(folder: Path) -> Source:
    """The model in `folder`. Raises UnfitSourceError that names what is missing or wrong."""
    if not (folder / INDEX).is_file():
        return Source("huggingface", (_file(folder / SINGLE),))
    if (folder / SINGLE).is_file():
        raise UnfitSourceError(f"{folder} has {SINGLE} and {INDEX}: two models; leave one of them")
    where = _weight_map(folder / INDEX)
    missing = sorted({name for name in where.values() if not (folder / name).is_file()})
    if missing:
        raise UnfitSourceError(
            f"{folder} lacks files that {INDEX} names ({len(missing)}), such as {missing[0]}"
        )
    files = tuple(_file(folder / name) for name in sorted(set(where.values())))
    found = {piece.tensor: file.path.name for file in files for piece in file.pieces}
    for name in sorted(where.keys() | found.keys()):
        if where.get(name) != found.get(name):
            raise UnfitSourceError(
                f"{name} should be in {where.get(name, 'no file')} as {INDEX} says, and is in "
                f"{found.get(name, 'none')}"
            )
    if len(found) < sum(len(file.pieces) for file in files):
        raise UnfitSourceError(f"{folder} has a tensor in two files")
    return Source("huggingface", files)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        names = {str(k): str(v) for k, v in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UnfitSourceError(f"{path} is no index of safetensors files: {exc!r}") from exc
    outside = next((v for v in names.values() if Path(v).name != v), None)
    if outside is not None or not names:
        raise UnfitSourceError(f"{path} names {outside or 'no file'}: files must lie beside it")
    return names


def _file(path: Path) -> SourceFile:
    header, begin = _header(path)
    size, pieces = path.stat().st_size, []
    for name, entry in header.items():
        if name != "__metadata__":
            pieces.append(_piece(path, name, entry, begin, size))
    if not pieces:
        raise UnfitSourceError(f"{path} holds no tensor")
    end = max(piece.offset + piece.length for piece in pieces)
    if end != size:
        raise UnfitSourceError(f"{path} has {size} bytes, its header says {end}: it was not copied whole")
    return SourceFile(path, tuple(pieces))


def _header(path: Path) -> tuple[Mapping[str, Any], int]:
    """The header and where the bytes begin."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise UnfitSourceError(f"{path} is no safetensors file: a header of {length} bytes")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as exc:
        if isinstance(exc, UnfitSourceError):
            raise
        raise UnfitSourceError(f"{path} cannot be read as a safetensors file: {exc}") from exc
    if not isinstance(header, dict):
        raise UnfitSourceError(f"{path} is no safetensors file: its header is no table")
    return header, 8 + length


def _piece(path: Path, name: str, entry: Any, begin: int, size: int) -> Piece:
    try:
        code, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        first, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as exc:
        raise UnfitSourceError(f"{path}: the entry of {name} is malformed: {exc!r}") from exc
    if code not in _NAMES:
        raise UnfitSourceError(
            f"{path}: {name} has dtype {code}, which no checkpoint holds: convert it first"
        )
    expected = prod(shape) * ITEM_SIZE[_NAMES[code]]
    if end - first != expected or min(shape, default=0) < 0:
        raise UnfitSourceError(
            f"{path}: {name} is {code}{list(shape)}, which takes {expected} bytes, and has {end - first}"
        )
    if first < 0 or begin + end > size:
        raise UnfitSourceError(
            f"{path}: {name} ends at byte {begin + end} of a file of {size} bytes: it was not copied whole"
        )
    return Piece(name, _NAMES[code], shape, (0,) * len(shape), shape, begin + first)

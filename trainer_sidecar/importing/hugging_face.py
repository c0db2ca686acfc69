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
    found = _json(path, path.read_bytes(), "an index of safetensors files")
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict):
        raise UnfitSourceError(f"{path} is no index of safetensors files: it has no table weight_map")
    for name, file in names.items():
        if not isinstance(file, str):
            raise UnfitSourceError(f"{path}: {name} is in {file!r}, which is no file's name")
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
            header = _json(path, file.read(length), "a safetensors file")
    except OSError as exc:
        raise UnfitSourceError(f"{path} cannot be read as a safetensors file: {exc}") from exc
    if not isinstance(header, dict):
        raise UnfitSourceError(f"{path} is no safetensors file: its header is no table")
    return header, 8 + length


def _piece(path: Path, name: str, entry: Any, begin: int, size: int) -> Piece:
    wanted = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or any(key not in entry for key in wanted):
        raise UnfitSourceError(f"{path}: the entry of {name} is malformed: {', '.join(wanted)} are wanted")
    code, shape = entry["dtype"], tuple(_numbers(path, name, entry, "shape"))
    offsets = _numbers(path, name, entry, "data_offsets")
    if not isinstance(code, str) or len(offsets) != 2:
        raise UnfitSourceError(f"{path}: the entry of {name} is malformed: {entry!r}")
    first, end = offsets
    if code not in _NAMES:
        raise UnfitSourceError(
            f"{path}: {name} has dtype {code}, which no checkpoint holds: convert it first"
        )
    expected = prod(shape) * ITEM_SIZE[_NAMES[code]]
    if end - first != expected:
        raise UnfitSourceError(
            f"{path}: {name} is {code}{list(shape)}, which takes {expected} bytes, and has {end - first}"
        )
    if begin + end > size:
        raise UnfitSourceError(
            f"{path}: {name} ends at byte {begin + end} of a file of {size} bytes: it was not copied whole"
        )
    return Piece(name, _NAMES[code], shape, (0,) * len(shape), shape, begin + first)


def _numbers(path: Path, name: str, entry: dict[str, Any], key: str) -> list[int]:
    """Whole numbers from 0 on, as they stand there: nothing is rounded or taken for another."""
    found = entry[key]
    if not isinstance(found, list) or not all(type(n) is int and n >= 0 for n in found):
        raise UnfitSourceError(
            f"{path}: {name} has the {key} {found!r}, which is no list of whole numbers from 0 on"
        )
    return found


def _json(path: Path, data: bytes, kind: str) -> Any:
    """A document that names nothing twice. Raises UnfitSourceError."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for at, name in enumerate(names) if name in names[:at])
            raise UnfitSourceError(f"{path} names {twice!r} twice")
        return found

    try:
        return json.loads(data, object_pairs_hook=table)
    except UnfitSourceError:
        raise
    except RecursionError as exc:
        raise UnfitSourceError(f"{path} cannot be read as {kind}: it is nested too deeply") from exc
    except ValueError as exc:
        raise UnfitSourceError(f"{path} cannot be read as {kind}: {exc}") from exc

"""A folder of torch.distributed.checkpoint, as its FileSystemWriter leaves it: where each tensor's bytes lie.

Its index is a pickle, of which only the names that the format needs are taken: a folder from elsewhere runs no code
here. Each piece was written by `torch.save`, a zip file without compression within a `.distcp` file, so that its bytes
lie there as they are. Needs torch.
"""

import io
import pickle
import zipfile
from enum import Enum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainer_sidecar.importing.source import Piece, Source, SourceFile, UnfitSourceError
from trainer_sidecar.store.merge import ITEM_SIZE

if TYPE_CHECKING:
    from typing import BinaryIO

METADATA = ".metadata"
_CLASSES_OF = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}
_MALFORMED = (AttributeError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What a pickle of other values than an index has them runs into."""
_LOCAL_HEADER = 30
"""Bytes of a zip member's header before its name."""


def read(folder: Path) -> Source:
    """Tensors and other entries of the checkpoint in `folder`. Raises UnfitSourceError."""
    try:
        import torch
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
    except ImportError as exc:
        raise UnfitSourceError(f"a folder of torch.distributed.checkpoint needs torch here: {exc}") from exc
    index = _index(folder / METADATA, torch)
    try:
        return _source(folder, index, MetadataIndex, TensorStorageMetadata)
    except _MALFORMED as exc:
        raise UnfitSourceError(
            f"{folder / METADATA} is malformed: {type(exc).__name__}: {exc}: save the checkpoint again with dcp.save"
        ) from exc


def _source(folder: Path, index: Any, at: Any, tensors: Any) -> Source:
    files: dict[str, list[Piece]] = {}
    others = []
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, tensors):
            others.append(name)
            continue
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        if dtype not in ITEM_SIZE:
            raise UnfitSourceError(f"{name} has dtype {dtype}, which no checkpoint holds: convert it first")
        for chunk in entry.chunks:
            stored = index.storage_data.get(at(name, chunk.offsets))
            if stored is None:
                raise UnfitSourceError(
                    f"{folder / METADATA}: nothing says where {name} at {list(chunk.offsets)} lies"
                )
            start, size = tuple(chunk.offsets), tuple(chunk.sizes)
            path = _beside(folder, stored.relative_path)
            offset = _payload(path, stored, name, dtype, size)
            files.setdefault(path.name, []).append(Piece(name, dtype, tuple(entry.size), start, size, offset))
    found = tuple(SourceFile(folder / name, tuple(pieces)) for name, pieces in sorted(files.items()))
    return Source("dcp", found, tuple(others))


def _index(path: Path, torch: Any) -> Any:
    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if dtype or (module, name) in _ALLOWED:
                return super().find_class(module, name)
            if (module, name) == ("builtins", "getattr"):
                return _enumerated
            # Of the module, only classes that it defines itself: a name with dots, or one that it has imported, may be
            # anything.
            found = super().find_class(module, name) if module == _CLASSES_OF and "." not in name else None
            if isinstance(found, type) and found.__module__ == module:
                return found
            raise UnfitSourceError(
                f"{path} names {module}.{name}, which no index of torch.distributed.checkpoint needs: it is not "
                "read, since reading it could run anything"
            )

    try:
        found = Reader(io.BytesIO(path.read_bytes())).load()
    except UnfitSourceError:
        raise
    except (
        *_MALFORMED,
        OSError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        ImportError,
        MemoryError,
    ) as exc:
        raise UnfitSourceError(
            f"{path} cannot be read as an index of torch.distributed.checkpoint: {type(exc).__name__}: {exc}"
        ) from exc
    if not getattr(found, "state_dict_metadata", None) or not isinstance(found.storage_data, dict):
        raise UnfitSourceError(
            f"{path} is no index that torch's FileSystemWriter has written, or one of nothing"
        )
    return found


def _enumerated(kind: Any, name: Any) -> Any:
    """A member of an enumeration: some versions of Python write them as a call of getattr. Raises UnfitSourceError for
    anything else, which getattr would fetch."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise UnfitSourceError(
            f"an index that fetches {name!r} of {kind!r}: it is not read, since that could run anything"
        )
    return kind[name]


def _beside(folder: Path, name: str) -> Path:
    path = folder / name
    if Path(name).name != name:
        raise UnfitSourceError(f"{folder / METADATA} names {name}: files must lie beside it")
    if not path.is_file():
        raise UnfitSourceError(f"{folder} lacks {name}, which {METADATA} names")
    return path


def _payload(path: Path, stored: Any, name: str, dtype: str, size: tuple[int, ...]) -> int:
    """Where the piece's bytes begin in its file. Raises UnfitSourceError when they do not lie there as they are."""
    what = f"{name} in {path}"
    if getattr(stored, "transform_descriptors", None):
        raise UnfitSourceError(
            f"{what} was transformed by its writer (compressed): save it without extensions"
        )
    if stored.offset + stored.length > path.stat().st_size:
        raise UnfitSourceError(
            f"{what} ends at byte {stored.offset + stored.length} of a file of {path.stat().st_size} bytes: it was not "
            "copied whole"
        )
    with path.open("rb") as file:
        part = _Part(file, stored.offset, stored.length)
        try:
            inside = _member(part, what, prod(size) * ITEM_SIZE[dtype], size)
        except UnfitSourceError:
            raise
        except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as exc:
            raise UnfitSourceError(f"{what} was not written by torch.save: {exc}") from exc
    return int(stored.offset) + inside


def _member(part: "_Part", what: str, length: int, size: tuple[int, ...]) -> int:
    import torch

    part.seek(0)
    tensor = torch.load(cast("BinaryIO", part), weights_only=True, map_location="cpu")
    part.seek(0)
    members = [m for m in zipfile.ZipFile(part).infolist() if "/data/" in m.filename]
    plain = (
        isinstance(tensor, torch.Tensor)
        and tuple(tensor.shape) == size
        and tensor.is_contiguous()
        and tensor.storage_offset() == 0
    )
    if not plain or len(members) != 1 or members[0].compress_type or members[0].file_size != length:
        raise UnfitSourceError(
            f"{what} is no tensor of shape {list(size)} that lies there in one run: save it again with dcp.save"
        )
    part.seek(members[0].header_offset + _LOCAL_HEADER - 4)
    lengths = part.read(4)
    names = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return members[0].header_offset + _LOCAL_HEADER + names


class _Part(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: "BinaryIO", offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._offset + self._at)
        data = self._file.read(max(0, min(len(view), self._length - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

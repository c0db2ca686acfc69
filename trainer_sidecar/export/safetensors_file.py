"""Files in the safetensors format (a JSON header of names, dtypes, shapes and offsets, then the bytes), several of them
when one would be too large, with the index that transformers reads.

Format: https://huggingface.co/docs/safetensors (header length as u64, little-endian; the header padded with spaces).
"""

import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer_sidecar.export.source import Block, Source, Stored, blocks
from trainer_sidecar.store.fan_out import fan_out

BLOCK_BYTES = 8 * 1024 * 1024
_ALIGN = 64
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Torch's names and the format's."""
RAW = "U8"
"""What stands for a dtype that the format lacks, where the file is only a way to another one: an element's bytes are
one dimension more."""


@dataclass(frozen=True)
class Shard:
    """One file to be written: its name, and the tensors in it by their exported name."""

    file: str
    tensors: dict[str, Stored]


def plan(tensors: Mapping[str, Stored], stem: str, limit: int, *, raw: bool = False) -> list[Shard]:
    """Tensors in order over files of at most `limit` bytes (a larger tensor has a file of its own).

    Raises ValueError for a dtype that the format does not have, unless `raw`: then their bytes are written (RAW).
    """
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES and not raw]
    if odd:
        more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        raise ValueError(
            f"{odd[0]} has dtype {tensors[odd[0]].dtype}, which safetensors does not have{more}: leave it out by "
            f"--exclude '{odd[0]}', or export with --format dcp, which has it"
        )
    groups: list[dict[str, Stored]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if groups[-1] and used + tensor.bytes > limit:
            groups.append({})
            used = 0
        groups[-1][name] = tensor
        used += tensor.bytes
    if len(groups) == 1:
        return [Shard(f"{stem}.safetensors", groups[0])]
    count = len(groups)
    return [Shard(f"{stem}-{i:05d}-of-{count:05d}.safetensors", g) for i, g in enumerate(groups, 1)]


def index_of(shards: Sequence[Shard]) -> dict[str, Any]:
    """`<stem>.safetensors.index.json`: which file holds which tensor."""
    total = sum(t.bytes for s in shards for t in s.tensors.values())
    names = {name: shard.file for shard in shards for name in shard.tensors}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}


def write(
    source: Source,
    shard: Shard,
    folder: Path,
    metadata: Mapping[str, str],
    *,
    parallel: int,
    progress: Callable[[int], None],
) -> Path:
    """Write one file and return its path; it has its name only when it is whole and on the disk.

    Holds `parallel` x 8 MiB, whatever the size of the model. Raises OSError, and as `Source.read`.
    """
    header, offsets = _header(shard, metadata)
    path = folder / shard.file
    partial = path.with_name(path.name + ".partial")
    with partial.open("w+b") as out:
        out.write(header)
        size = len(header) + sum(t.bytes for t in shard.tensors.values())
        os.posix_fallocate(out.fileno(), 0, size)
        work = [
            (tensor, len(header) + offsets[name], piece.file, block)
            for name, tensor in shard.tensors.items()
            for piece in tensor.slices
            for block in blocks(piece, tensor.itemsize, BLOCK_BYTES)
        ]

        def carry(job: tuple[Stored, int, Any, Block]) -> int:
            tensor, base, file, block = job
            data = source.read(file, block.offset, block.length)
            _place(out.fileno(), base, tensor, block, data)
            return block.length

        for done in fan_out(carry, work, parallel):
            progress(done)
        out.flush()
        os.fsync(out.fileno())
    partial.rename(path)
    return path


def _header(shard: Shard, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets, at = {}, 0
    for name, tensor in shard.tensors.items():
        end = at + tensor.bytes
        code, shape = DTYPES.get(tensor.dtype, RAW), list(tensor.shape)
        if tensor.dtype not in DTYPES:
            shape.append(tensor.itemsize)
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        offsets[name], at = at, end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text, offsets


def _place(fd: int, base: int, tensor: Stored, block: Block, data: memoryview) -> None:
    """Put a block's bytes where they lie in the global tensor."""
    item, shape = tensor.itemsize, tensor.shape
    strides = [item] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    start = base + sum(s * stride for s, stride in zip(block.start, strides, strict=True))
    whole = next((d for d in range(len(shape)) if block.size[d] != 1), len(shape))
    if block.size[whole + 1 :] == shape[whole + 1 :]:  # one run in the file as well
        _pwrite(fd, data, start)
        return
    rows = np.frombuffer(data, np.uint8).reshape(*block.size, item)
    end = start + sum((n - 1) * stride for n, stride in zip(block.size, strides, strict=True)) + item
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, end - page, offset=page) as mapped:
        target = np.ndarray((*block.size, item), np.uint8, mapped, start - page, (*strides, 1))
        target[...] = rows
        del target  # a view keeps the map from closing


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written

"""State digest (datapath T19): one number for the whole state that no sharding changes and that parts add up to.

    digest = sum over all elements of  mix(bits, key(name), global index)   mod 2^128

A sum has no order and no owner, so a state saved by 4 ranks and loaded by 3 must give the same number, without any
gather. It finds lost, swapped, duplicated and changed elements; it is not made against an adversary (SHA-256 is).
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from trainer_sidecar.train import native
from trainer_sidecar.train.boxes import Box, row_runs, whole

MODULUS = 1 << 128
_BLOCK = 1 << 15
_INDEX = np.arange(_BLOCK, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_C_INDEX = 0x9E3779B97F4A7C15
_C_BITS = np.uint64(0xD1B54A32D192ED03)
_C_MIX = np.uint64(0xBF58476D1CE4E5B9)
_C_OUT = np.uint64(0x94D049BB133111EB)
_C_LOW = np.uint64(0xA0761D6478BD642F)
_U31, _U32 = np.uint64(31), np.uint64(32)
_MASK64 = (1 << 64) - 1
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@functools.lru_cache(maxsize=1 << 16)
def name_key(name: str, dtype: str) -> int:
    """64-bit key of a tensor."""
    return int.from_bytes(hashlib.sha256(f"rtj-digest-1\n{name}\n{dtype}".encode()).digest()[:8], "little")


def box_digest(name: str, dtype: str, shape: tuple[int, ...], place: Box, data: np.ndarray) -> int:
    """Digest of the elements in `place` of a tensor of global `shape`.

    `data` is the box's bytes, C-contiguous (any dtype; viewed as unsigned words). Elements of 16 bytes count as two.
    """
    itemsize = data.nbytes // max(place.numel, 1)
    if itemsize > 8:
        shape, place = (*shape, itemsize // 8), Box((*place.start, 0), (*place.size, itemsize // 8))
        itemsize = 8
    if place.numel == 0:
        return 0
    words = data.reshape(-1).view(np.uint8).view(_WORDS[itemsize])
    starts, run = row_runs(whole(shape), place)
    key = name_key(name, dtype)
    if (mix_runs := _native()) is not None:
        return mix_runs(words, starts, run, key) % MODULUS
    if run >= 256 or len(starts) == 1:
        return _sum_runs(words, starts, run, key)
    return _sum_scattered(words, starts, run, key)


@functools.cache
def _native() -> native.MixRuns | None:
    """The compiled loop, once it has given what numpy gives."""
    mix_runs = native.load()
    if mix_runs is None:
        return None
    data, starts = (np.arange(2400, dtype=np.uint32) * np.uint32(0x9E3779B1)).view(np.uint8), np.array([7])
    for words in (data.view(word) for word in _WORDS.values()):
        if mix_runs(words, starts, words.size, 1) % MODULUS != _sum_runs(words, starts, words.size, 1):
            raise RuntimeError(
                f"{native.LIBRARY} computes other digests than this version: build the package anew"
            )
    return mix_runs


def add(*digests: int) -> int:
    """Digests of parts make the digest of the whole."""
    return sum(digests) % MODULUS


def to_hex(digest: int) -> str:
    """32 hex digits."""
    return f"{digest % MODULUS:032x}"


def _sum_runs(words: np.ndarray, starts: np.ndarray, run: int, key: int) -> int:
    total = 0
    for i, start in enumerate(starts.tolist()):
        for at in range(0, run, _BLOCK):
            block = words[i * run + at : i * run + min(at + _BLOCK, run)]
            offset = np.uint64(((start + at) * _C_INDEX + key) & _MASK64)
            total += _mix(block.astype(np.uint64), _INDEX[: len(block)] + offset)
    return total % MODULUS


def _sum_scattered(words: np.ndarray, starts: np.ndarray, run: int, key: int) -> int:
    """Short rows (a column shard): as many whole rows per block as fit."""
    total, rows = 0, max(1, _BLOCK // run)
    within = np.arange(run, dtype=np.int64)
    for at in range(0, len(starts), rows):
        index = (starts[at : at + rows, None] + within).reshape(-1).astype(np.uint64)
        block = words[at * run : at * run + len(index)].astype(np.uint64)
        total += _mix(block, index * np.uint64(_C_INDEX) + np.uint64(key))
    return total % MODULUS


def _mix(bits: np.ndarray, salt: np.ndarray) -> int:
    """Sum of the mixed elements; overwrites both arrays. The high words wrap at 2^64; the low ones have 32 bits each
    and are summed exactly, so that carries are right."""
    bits *= _C_BITS
    bits ^= salt
    bits *= _C_MIX
    np.right_shift(bits, _U32, out=salt)
    bits ^= salt
    bits *= _C_OUT
    high = int(bits.sum(dtype=np.uint64))
    np.right_shift(bits, _U31, out=salt)
    salt ^= bits
    salt *= _C_LOW
    salt >>= _U32
    return (high << 64) + int(salt.sum(dtype=np.uint64))

"""The compiled inner loop of the state digest (`mix.c`), where the package was built with it.

It is an optimisation and nothing else: without the file, or with one that another machine made and this one cannot run,
numpy gives the same digests. A library that computes something else is refused.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

LIBRARY = Path(__file__).with_name("libmix.so")
MixRuns = Callable[[np.ndarray, np.ndarray, int, int], int]
"""(words, starts, run, key) to the sum of the mixed elements; words lie `run` by `run` from the indices `starts` on."""
MOST = 1 << 32
"""Elements whose low halves fit into 64 bits together."""
log = logging.getLogger(__name__)
_STEP = 0x9E3779B97F4A7C15


def load(path: Path = LIBRARY, most: int = MOST) -> MixRuns | None:
    """The loop of a library, `most` elements at a time; None when it cannot be used, with a warning unless it is not
    there."""
    if not path.exists():
        return None
    try:
        _check_whole(path)
        mix_runs = _bound(ctypes.CDLL(str(path)), most)
    except (OSError, AttributeError) as exc:
        log.warning("%s cannot be used, digests take longer: %s", path, exc)
        return None
    return mix_runs


def _check_whole(path: Path) -> None:
    """Raises OSError for a file that is cut off: a part of it that is mapped and not there ends the process."""
    head = path.read_bytes()[:64]
    if len(head) < 64 or head[:4] != b"\x7fELF":
        raise OSError(f"{path.stat().st_size} bytes that are no shared library")
    sections, size, count = struct.unpack_from("<Q", head, 40)[0], *struct.unpack_from("<HH", head, 58)
    if path.stat().st_size < sections + size * count:
        raise OSError(f"{path.stat().st_size} bytes of {sections + size * count}: install the package again")


def _bound(library: ctypes.CDLL, most: int) -> MixRuns:
    word, size = ctypes.c_uint64, ctypes.c_size_t
    act = library.mix_runs
    act.argtypes = [ctypes.c_void_p, size, ctypes.c_void_p, size, size, word, word, ctypes.c_void_p]
    act.restype = ctypes.c_int

    def some(words: np.ndarray, starts: np.ndarray, run: int, key: int) -> int:
        sums = (word * 2)()
        # The call releases the GIL; both arrays outlive it.
        if act(words.ctypes.data, words.itemsize, starts.ctypes.data, len(starts), run, key, _STEP, sums):
            raise ValueError(f"elements of {words.itemsize} bytes")
        return int((sums[0] << 64) + sums[1])

    def mix_runs(words: np.ndarray, starts: np.ndarray, run: int, key: int) -> int:
        starts = np.ascontiguousarray(starts, dtype=np.int64)
        if words.size != len(starts) * run:
            raise ValueError(f"{words.size} elements are not {len(starts)} runs of {run}")
        total = 0
        if run > most:
            for i, at in ((i, at) for i in range(len(starts)) for at in range(0, run, most)):
                piece = words[i * run + at : i * run + min(at + most, run)]
                total += some(piece, starts[i : i + 1] + at, len(piece), key)
            return total
        rows = max(1, most // max(run, 1))
        for at in range(0, len(starts), rows):
            few = starts[at : at + rows]
            total += some(words[at * run : (at + len(few)) * run], few, run, key)
        return total

    return mix_runs

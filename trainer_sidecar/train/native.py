"""The compiled inner loop of the state digest (`mix.c`), where the package was built with it.

It is an optimisation and nothing else: without the file, or with one that another machine made and this one cannot run,
numpy gives the same digests. A library that computes something else is refused.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

LIBRARY = Path(__file__).with_name("libmix.so")
MixRuns = Callable[[np.ndarray, np.ndarray, int, int], int]
"""(words, starts, run, key) to the sum of the mixed elements; words lie `run` by `run` from the indices `starts` on."""
log = logging.getLogger(__name__)
_STEP = 0x9E3779B97F4A7C15
_MOST = 1 << 32
"""Elements whose low halves fit into 64 bits together."""


def load(path: Path = LIBRARY) -> MixRuns | None:
    """The loop of a library; None, with a warning unless there is no file, when it cannot be used."""
    if not path.exists():
        return None
    try:
        mix_runs = _bound(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as exc:
        log.warning("%s cannot be used, digests take longer: %s", path, exc)
        return None
    return mix_runs


def _bound(library: ctypes.CDLL) -> MixRuns:
    word, size = ctypes.c_uint64, ctypes.c_size_t
    act = library.mix_runs
    act.argtypes = [ctypes.c_void_p, size, ctypes.c_void_p, size, size, word, word, ctypes.c_void_p]
    act.restype = ctypes.c_int

    def mix_runs(words: np.ndarray, starts: np.ndarray, run: int, key: int) -> int:
        starts = np.ascontiguousarray(starts, dtype=np.int64)
        if words.size != len(starts) * run:
            raise ValueError(f"{words.size} elements are not {len(starts)} runs of {run}")
        total, rows = 0, max(1, _MOST // max(run, 1))
        for at in range(0, len(starts), rows):
            some, sums = starts[at : at + rows], (word * 2)()
            first = words[at * run : (at + len(some)) * run]
            # The call releases the GIL.
            failed = act(
                first.ctypes.data, words.itemsize, some.ctypes.data, len(some), run, key, _STEP, sums
            )
            if failed:
                raise ValueError(f"elements of {words.itemsize} bytes")
            total += (sums[0] << 64) + sums[1]
        return total

    return mix_runs

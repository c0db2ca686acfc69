"""Many store calls at once, results in order; one after the other, in the caller's thread, when asked to."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def fan_out(call: Callable[[A], B], items: Iterable[A], parallel: int) -> Iterator[B]:
    """`map(call, items)` over `parallel` threads. The rest is not started once the consumer stops."""
    work = list(items)
    if parallel <= 1 or len(work) <= 1:
        yield from map(call, work)
        return
    pool = ThreadPoolExecutor(min(parallel, len(work)), thread_name_prefix="rtj-store")
    try:
        yield from pool.map(call, work)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

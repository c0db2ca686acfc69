"""Faults by place and count around any store: lost requests, lost replies, outages. For tests and drills.

A fault is small and says what it does to the n-th call of one operation on keys that match; `fired` proves that it
happened.
"""

import fnmatch
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trainer_sidecar.store.base import Hashes, ObjectInfo, Store, StoreError, UnavailableError, UnclearError

T = TypeVar("T")
_WRITES = frozenset({"create", "create_large", "put", "delete"})


@dataclass
class Fault:
    """`times` calls of `op` on keys that match `pattern`, after `skip` untouched ones, fail.

    `lose` = "request": the call never reaches the store. "reply": it has its effect, then the answer is lost.
    """

    op: str
    pattern: str = "*"
    lose: str = "request"
    skip: int = 0
    times: int = 1
    error: Callable[[str], StoreError] | None = None
    fired: int = 0
    _seen: int = field(default=0, repr=False)

    def hits(self, op: str, key: str) -> bool:
        if op != self.op or not fnmatch.fnmatchcase(key, self.pattern):
            return False
        self._seen += 1
        if self._seen <= self.skip or self.fired >= self.times:
            return False
        self.fired += 1
        return True

    def make_error(self, op: str, key: str) -> StoreError:
        if self.error is not None:
            return self.error(key)
        kind = UnclearError if op in _WRITES else UnavailableError
        return kind(f"injected: {self.lose} of {op} {key} lost", key=key)


class FaultyStore:
    """A store around another one. `hook(op, key, when)` is called before and after each call and may raise."""

    def __init__(
        self,
        inner: Store,
        *faults: Fault,
        hook: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self.inner, self.url, self.faults, self.hook = inner, inner.url, list(faults), hook
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        return self._call("get", key, lambda: self.inner.get(key))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._call("get_range", key, lambda: self.inner.get_range(key, offset, length))

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._call("list", prefix, lambda: self.inner.list(prefix, start_after=start_after))

    def create(self, key: str, data: bytes) -> None:
        self._call("create", key, lambda: self.inner.create(key, data))

    def create_large(
        self,
        key: str,
        data: memoryview,
        *,
        parallel: int = 4,
        hashes: Hashes | None = None,
        document: bool = False,
    ) -> ObjectInfo:
        return self._call(
            "create_large",
            key,
            lambda: self.inner.create_large(key, data, parallel=parallel, hashes=hashes, document=document),
        )

    def put(self, key: str, data: bytes) -> None:
        self._call("put", key, lambda: self.inner.put(key, data))

    def delete(self, keys: Sequence[str]) -> None:
        self._call("delete", keys[0] if keys else "", lambda: self.inner.delete(keys))

    def discard_unfinished(self, prefix: str, wanted: Callable[[str], bool]) -> int:
        return self._call("discard_unfinished", prefix, lambda: self.inner.discard_unfinished(prefix, wanted))

    def close(self) -> None:
        self.inner.close()

    def _call(self, op: str, key: str, act: Callable[[], T]) -> T:
        with self._lock:
            self.calls.append((op, key))
            fault = next((f for f in self.faults if f.hits(op, key)), None)
        if self.hook:
            self.hook(op, key, "before")
        if fault and fault.lose == "request":
            raise fault.make_error(op, key)
        result = act()
        if self.hook:
            self.hook(op, key, "after")
        if fault:
            raise fault.make_error(op, key)
        return result

"""Real protocol code, stopped before every store call: who goes on next, and what becomes of the call, is chosen from
outside. This is how crashes, lost, late and doubled replies and any interleaving are explored deterministically.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer_sidecar.store.base import Hashes, ObjectInfo, Store, StoreError, UnavailableError, UnclearError

WRITES = ("create", "create_large", "put", "delete")
FATES = ("go", "lose request", "lose reply", "late", "twice")
"""What can become of a call: done; never arrives; done, and the answer lost; arrives later; done twice."""


class Crash(BaseException):
    """The process of an actor ends between two store calls."""


class Actor:
    """A program on a thread of its own. `step(fate)` lets its pending store call happen and runs it to the next one."""

    def __init__(self, name: str, store: Store, program: Callable[[Store], Any]) -> None:
        self.name, self.inner, self._program = name, store, program
        self.pending: tuple[str, str] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.late: list[Callable[[], Any]] = []
        self._fate = ""
        self._turn, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._wait()

    def step(self, fate: str = "go") -> None:
        assert not self.done
        self._fate = fate
        self._turn.release()
        self._wait()

    def crash(self) -> None:
        self.step("crash")
        assert self.done

    def finish(self, limit: int = 500) -> None:
        """Without further faults, to the end."""
        for _ in range(limit):
            if self.done:
                return
            self.step()
        raise AssertionError(f"{self.name} does not end: pending {self.pending}")

    def _wait(self) -> None:
        assert self._parked.acquire(timeout=30), f"{self.name} neither calls the store nor ends"

    def _run(self) -> None:
        try:
            self.result = self._program(_Gate(self))
        except BaseException as exc:
            self.error = exc
        self.pending, self.done = None, True
        self._parked.release()

    def call(self, op: str, key: str, act: Callable[[], Any]) -> Any:
        self.pending = (op, key)
        self._parked.release()
        self._turn.acquire()
        fate, lost = self._fate, UnclearError if op in WRITES else UnavailableError
        if fate == "crash":
            raise Crash
        if fate == "late" and op in ("create", "create_large"):
            self.late.append(act)
            raise lost("injected: late")
        if fate in ("lose request", "late"):
            raise lost("injected: request lost")
        if fate == "twice":
            _ignore_errors(act)
        result = act()
        if fate == "lose reply":
            raise lost("injected: reply lost")
        return result


def _ignore_errors(act: Callable[[], Any]) -> None:
    try:
        act()
    except StoreError:
        return


class _Gate:
    """The store as an actor sees it."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._inner, self.url = actor, actor.inner, actor.inner.url

    def get(self, key: str) -> bytes:
        return bytes(self._actor.call("get", key, lambda: self._inner.get(key)))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return bytes(self._actor.call("get_range", key, lambda: self._inner.get_range(key, offset, length)))

    def head(self, key: str) -> ObjectInfo:
        info: ObjectInfo = self._actor.call("head", key, lambda: self._inner.head(key))
        return info

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = self._actor.call(
            "list", prefix, lambda: [*self._inner.list(prefix, start_after=start_after)]
        )
        return iter(found)

    def create(self, key: str, data: bytes) -> None:
        self._actor.call("create", key, lambda: self._inner.create(key, data))

    def create_large(
        self,
        key: str,
        data: memoryview,
        *,
        parallel: int = 4,
        hashes: Hashes | None = None,
        document: bool = False,
    ) -> ObjectInfo:
        """Retried inside, as the contract says; each try is a call of its own."""
        kept = memoryview(bytes(data))
        for _ in range(20):
            try:
                info: ObjectInfo = self._actor.call(
                    "create_large",
                    key,
                    lambda: self._inner.create_large(
                        key, kept, parallel=parallel, hashes=hashes, document=document
                    ),
                )
            except UnclearError:
                continue
            return info
        raise UnclearError("injected: given up", key=key)

    def put(self, key: str, data: bytes) -> None:
        self._actor.call("put", key, lambda: self._inner.put(key, data))

    def delete(self, keys: Sequence[str]) -> None:
        self._actor.call("delete", keys[0] if keys else "", lambda: self._inner.delete(keys))

    def close(self) -> None:
        """Nothing to close."""

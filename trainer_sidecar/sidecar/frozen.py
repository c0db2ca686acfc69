"""Bytes that training does not change, from a rank's file to `frozen/<sha256>`: written once per run (datapath T8).

Named by their digest, so that every attempt, rank and pod may write the same bytes again and finds them there. Nothing
is remembered over a restart: the rank asks again.
"""

import hashlib
import logging
import mmap
import os
import re
import threading
from dataclasses import dataclass, field

from trainer_sidecar.contract.checkpoint import FrozenObject, leaf_hashes, tree_root
from trainer_sidecar.contract.journal import ObjectRef
from trainer_sidecar.contract.keys import WIDE_LEAF_SIZE
from trainer_sidecar.contract.messages import FrozenReply, KeepFrozen
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar import workdir
from trainer_sidecar.sidecar.retry import StoppedError, keep_trying
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.store.base import StoreError

log = logging.getLogger(__name__)
_FILE = re.compile(r"^frozen-\d{1,4}$")


@dataclass
class _Keeping:
    size: int
    file: tuple[int, int] | None
    """Device and inode: a rank that was started again writes other bytes under the name of before."""
    kept: FrozenObject | None = None
    refused: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def runs(self) -> bool:
        """Neither kept nor refused yet."""
        return self.kept is None and not self.refused


class Frozen:
    """Thread-safe."""

    def __init__(self, volume: Volume, run: Run) -> None:
        self._volume, self._run = volume, run
        self._lock = threading.Lock()
        self._keeping: dict[tuple[int, str], _Keeping] = {}

    def keep(self, message: KeepFrozen) -> None:
        """Begin to write a file; the same request again changes nothing. Raises ValueError for a strange name.

        A rank asks for one file at a time: whatever it asked for before is given up, or each save that ran out of time
        would hold another copy of the weights while the store is away.
        """
        if not _FILE.match(message.file):
            raise ValueError(f"frozen file {message.file!r}: expected frozen-<number>")
        key, file = (message.rank, message.file), self._file(message.rank, message.file)
        with self._lock:
            known = self._keeping.get(key)
            if known is not None and known.runs and (known.size, known.file) == (message.size, file):
                return
            for former in [former for former in self._keeping if former[0] == message.rank]:
                self._keeping.pop(former).stop.set()
            self._keeping[key] = keeping = _Keeping(message.size, file)
        name = f"frozen-{message.rank}"
        threading.Thread(target=self._carry, args=(key, keeping), name=name, daemon=True).start()

    def _file(self, rank: int, name: str) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._volume.rank_stage(rank) / name)
        except OSError:
            return None  # opening it says why
        return found.st_dev, found.st_ino

    def reply(self, rank: int, file: str) -> FrozenReply:
        """How far it is."""
        with self._lock:
            keeping = self._keeping.get((rank, file))
        if keeping is None:
            return FrozenReply(known=False)
        return FrozenReply(known=True, kept=keeping.kept, refused=keeping.refused)

    def _carry(self, key: tuple[int, str], keeping: _Keeping) -> None:
        try:
            keeping.kept = self._write(key, keeping)
        except StoppedError:
            return
        except (StoreError, ValueError, OSError) as exc:
            log.error("frozen bytes are not kept", extra={"rank": key[0], "reason": str(exc)})
            keeping.refused = str(exc) or type(exc).__name__

    def _write(self, key: tuple[int, str], keeping: _Keeping) -> FrozenObject:
        rank, name = key
        handle = workdir.open_plain(self._volume.rank_stage(rank) / name, os.O_RDONLY)
        try:
            found = os.fstat(handle).st_size
            if found != keeping.size or not found:
                raise ValueError(f"{name} of rank {rank} has {found} bytes, {keeping.size} were announced")
            mapped = mmap.mmap(handle, found, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        view = memoryview(mapped)
        sha256, leaves = hashlib.sha256(view).hexdigest(), leaf_hashes(view, WIDE_LEAF_SIZE)
        store, keys = self._run.store, self._run.keys

        def told(error: str) -> None:
            if error:
                log.warning("frozen bytes wait for the store", extra={"rank": rank, "error": error})

        keep_trying(lambda: store().create_large(keys.frozen(sha256), view), keeping.stop, told)
        keep_trying(lambda: self._run.create_same(keys.frozen_leaves(sha256), leaves), keeping.stop, told)
        log.info("frozen bytes kept", extra={"rank": rank, "bytes": keeping.size, "sha256": sha256})
        digest = ObjectRef(size=len(leaves), sha256=hashlib.sha256(leaves).hexdigest())
        return FrozenObject(
            sha256=sha256,
            size=keeping.size,
            root=tree_root(keeping.size, leaves, WIDE_LEAF_SIZE),
            leaves=digest,
        )

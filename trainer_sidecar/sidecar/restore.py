"""A restore point opened for this pod's ranks: proven documents, and windows that hold only proven bytes.

Nothing is believed: the manifest is proven by the plan, everything else by digests in the manifest, bytes by hash
leaves (protocol R23). Each leaf is read from the store once per pod, whoever asks. A mismatch is read twice before it
counts (R24).
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import ValidationError

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.checkpoint import (
    FORMAT_SCHEMA,
    FrozenObject,
    Index,
    ManifestFile,
    ManifestShard,
    Part,
    Slices,
    Witness,
)
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.messages import RestoreOpened
from trainer_sidecar.contract.ranges import pieces
from trainer_sidecar.contract.restore_fault import Evidence
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar import ahead
from trainer_sidecar.sidecar.retry import keep_trying
from trainer_sidecar.sidecar.room import Room
from trainer_sidecar.sidecar.window import BadBytesError, Window
from trainer_sidecar.store.base import NotFoundError, Store, StoreError, TruncatedError, UnavailableError

log = logging.getLogger(__name__)

_D = TypeVar("_D", bound=Document)
_FILES_AHEAD = 4
_BYTES_AHEAD = 64 * 1024 * 1024
_TRIES = 8
"""Tries per request: about half a minute of a store that is away, then the rank hears of it and the attempt ends."""


class Restore:
    """One restore point, opened once per pod and epoch. Thread-safe after `open`."""

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        point: RestorePoint,
        volume: Volume,
        threads: int,
        witness_sha256: str | None = None,
    ) -> None:
        source = point.source
        self._store = store
        self._keys = RunKeys(source.namespace, source.run_id) if source else keys
        self._point, self._witness_sha256 = point, witness_sha256
        self.folder = volume.restore(point.checkpoint_id)
        self.room = Room(volume.work, point.checkpoint_id)
        self._pool = ThreadPoolExecutor(max(4, threads * 2), thread_name_prefix="fetch")
        self._stop = threading.Event()
        self._windows: list[Window] = []
        self._parts: dict[int, Part] = {}
        self._parts_lock = threading.Lock()
        self.started = time.monotonic()
        self.bytes_from_store = 0

    def open(self) -> RestoreOpened:
        """Read and prove manifest and index; make the windows.

        Raises BadBytesError (proven wrong, seen twice), NotFoundError, StoreError; StoppedError after `close`.
        """
        at = self._point.checkpoint_id
        self.manifest = self._proven(self._keys.manifest(at), self._point.manifest, ManifestFile)
        self.index = self._proven(self._keys.index(at), self.manifest.index, Index)
        schema = max(self.manifest.schema_, self.index.schema_)
        if schema > FORMAT_SCHEMA:
            raise ValueError(
                f"{at} has schema {schema}, this sidecar reads up to {FORMAT_SCHEMA}: use the image of the version "
                "that wrote it, or a newer one"
            )
        self._check_names()
        self.folder.mkdir(mode=0o777, parents=True, exist_ok=True)
        self.folder.chmod(0o777)
        if self.manifest.frozen:
            (self.folder / "frozen").mkdir(mode=0o777, exist_ok=True)
            (self.folder / "frozen").chmod(0o777)
        self._windows = [self._window(name) for name in self.index.files]
        self.room.needed = sum(window.size for window in self._windows)
        return RestoreOpened(
            manifest=self.manifest,
            tensors=self.index.tensors,
            files=self.index.files,
            folder=str(self.folder),
            witness=self._witness(),
        )

    def _check_names(self) -> None:
        known = {s.name for s in self.manifest.shards} | {f.name for f in self.manifest.frozen}
        for name in self.index.files:
            if name not in known:
                raise BadBytesError(
                    f"index of {self._point.checkpoint_id} names file {name!r}, its manifest does not"
                )

    def _window(self, name: str) -> Window:
        shard: ManifestShard | FrozenObject | None = None
        shard = next((s for s in self.manifest.shards if s.name == name), None)
        if shard is not None:
            at, rank = self._point.checkpoint_id, shard.rank
            key, leaves_key = self._keys.shard(at, rank), self._keys.leaves(at, rank)
        else:
            shard = next(f for f in self.manifest.frozen if f.name == name)
            key, leaves_key = self._keys.frozen(shard.sha256), self._keys.frozen_leaves(shard.sha256)

        def leaves() -> bytes:
            data = self._proven_bytes(leaves_key, shard.leaves)
            try:
                found = shard.root_of(data)
            except ValueError as exc:
                raise BadBytesError(str(Evidence(leaves_key, f"leaves of {name}", str(exc), 1))) from exc
            if found != shard.root:
                raise BadBytesError(str(Evidence(name, f"tree root {shard.root}", f"tree root {found}", 1)))
            return data

        return Window(self.folder / name, key, shard, leaves, self.room)

    def fetch(self, file: int, ranges: list[tuple[int, int]]) -> int:
        """Make byte ranges readable in a window; bytes read from the store for it.

        Raises ValueError for a range outside the file, and as `open`. VolumeFullError before the volume is full.
        """
        if not 0 <= file < len(self._windows):
            raise ValueError(f"file {file} is outside 0..{len(self._windows) - 1}")
        read = self._windows[file].fetch(ranges, self._read_range, self._pool)
        with self._parts_lock:
            self.bytes_from_store += read
        return read

    def read_ahead(self, now: Topology, local: range) -> None:
        """Make what these ranks will ask for readable before they do, as far as it is known. Raises as `fetch`."""
        sizes = [window.size for window in self._windows]
        ranges = ahead.needed(self.index, self.manifest, now, local, sizes)
        if ranges:
            self.room.needed = sum(length for parts in ranges.values() for _, length in parts)

        def read(file: int) -> None:
            # Ranks that ask meanwhile wait behind one such piece.
            for piece in pieces(ranges[file], _BYTES_AHEAD):
                self._windows[file].fetch([piece], self._read_range, self._pool, ahead=True)

        with ThreadPoolExecutor(_FILES_AHEAD, thread_name_prefix="ahead") as files:
            list(files.map(read, sorted(ranges)))

    def slices(self, tensors: list[int] | None) -> Slices:
        """Slices of some tensors (all for None). Raises ValueError for an unknown tensor."""
        every = self.index.slices
        if tensors is None:
            return every
        count = len(self.index.tensors.names)
        wrong = [t for t in tensors if not 0 <= t < count]
        if wrong:
            raise ValueError(f"tensor {wrong[0]} is outside 0..{count - 1}")
        wanted = set(tensors)
        at = [i for i, tensor in enumerate(every.tensor) if tensor in wanted]
        return Slices(
            tensor=[every.tensor[i] for i in at],
            file=[every.file[i] for i in at],
            offset=[every.offset[i] for i in at],
            length=[every.length[i] for i in at],
            start=[every.start[i] for i in at],
            size=[every.size[i] for i in at],
        )

    def rank_state(self, rank: int) -> object:
        """What saved rank `rank` keeps for itself alone. Raises ValueError when there was no such rank."""
        shard = next((s for s in self.manifest.shards if s.rank == rank), None)
        if shard is None:
            raise ValueError(
                f"checkpoint {self._point.checkpoint_id} has no rank {rank}, only {len(self.manifest.shards)}"
            )
        with self._parts_lock:
            if rank not in self._parts:
                self._parts[rank] = self._proven(
                    self._keys.part(self._point.checkpoint_id, rank), shard.part, Part
                )
            return self._parts[rank].seal.rank_state

    def close(self) -> None:
        """Stop reading and remove the windows; mapped pages live as long as a rank maps them."""
        self._stop.set()
        try:  # before the pool: what finds that shut down is of a window that is removed
            for window in self._windows:
                window.remove()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _proven(self, key: str, ref: ObjectRef, model: type[_D]) -> _D:
        data = self._proven_bytes(key, ref)
        try:
            return model.model_validate_json(data)
        except ValidationError as exc:
            raise BadBytesError(f"{key} is proven by its digest but is no {model.__name__}: {exc}") from exc

    def _proven_bytes(self, key: str, ref: ObjectRef) -> bytes:
        """All bytes of a small object that has the size and digest of `ref`, read twice when they differ."""
        found = ""
        for _ in range(2):
            data = self._try(key, lambda: self._store.get(key))
            found = f"{len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}"
            if len(data) == ref.size and hashlib.sha256(data).hexdigest() == ref.sha256:
                return data
        raise BadBytesError(str(Evidence(key, f"{ref.size} bytes, SHA-256 {ref.sha256}", found, 2)))

    def _read_range(self, key: str, offset: int, length: int) -> bytes:
        return self._try(key, lambda: self._store.get_range(key, offset, length), TruncatedError)

    def _try(self, key: str, act: Callable[[], bytes], *hopeless: type[StoreError]) -> bytes:
        """`act` until it succeeds; that something is missing counts when it is seen twice (protocol R24)."""

        def told(error: str) -> None:
            if error:
                log.warning(
                    "restore meets an error", extra={"checkpoint": self._point.checkpoint_id, "error": error}
                )

        for last in (False, True):
            try:
                return keep_trying(act, self._stop, told, tries=_TRIES, hopeless=(NotFoundError, *hopeless))
            except NotFoundError as exc:
                if last:
                    raise NotFoundError(
                        str(Evidence(key, "an object", "nothing", 2)), store=exc.store, key=key
                    ) from exc
        raise AssertionError("unreachable")

    def _witness(self) -> Witness | None:
        """What the epoch that saved has seen after it (protocol R22), the same for all pods: the one of the plan.

        Raises StoreError when that one is not there: another fence looks again. It accuses no checkpoint. Where the
        plan says nothing, what cannot be used is no evidence.
        """
        wanted = self._witness_sha256
        if wanted == "":
            return None
        key = self._keys.witness(self._point.checkpoint_id)
        try:
            data = self._try(key, lambda: self._store.get(key))
        except StoreError as exc:
            if wanted:
                raise UnavailableError(f"the plan's witness {key}: {exc}", store=exc.store, key=key) from exc
            if not isinstance(exc, NotFoundError):
                log.warning("no witness can be used", extra={"reason": str(exc)})
            return None
        if wanted and hashlib.sha256(data).hexdigest() != wanted:
            raise UnavailableError(
                f"{key} is not the witness of the plan, which has SHA-256 {wanted}", key=key
            )
        try:
            witness = Witness.model_validate_json(data)
        except ValidationError as exc:
            log.warning("no witness can be used", extra={"reason": str(exc)})
            return None
        return witness if witness.epoch == self.manifest.epoch else None

"""`file://`: a POSIX folder as an object store, also on a shared file system such as NFS or Lustre (protocol R17).

An object appears whole or not at all: its bytes go to a temporary file in the same folder, are synced, and `link(2)`
gives them their final name, which fails when the name is taken; then the folder is synced. Exclusive create followed by
writing would show readers an empty slot. HEAD shows no checksum: nothing but the file itself vouches for the bytes, and
reading them all would make HEAD as dear as GET; bytes are proven by the hash leaves on fetch (R23).
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from trainer_sidecar.store.base import (
    AccessDeniedError,
    AlreadyExistsError,
    BucketMissingError,
    ChecksumRefusedError,
    Hashes,
    NoSpaceError,
    NotFoundError,
    ObjectInfo,
    StoreError,
    TruncatedError,
    UnavailableError,
    UnsupportedStoreError,
)

T = TypeVar("T")
_TEMPORARY = ".tmp-"
_CHUNK = 8 * 1024 * 1024
_CAUSES: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOENT: (NotFoundError, "does not exist"),
    errno.ENOTDIR: (NotFoundError, "does not exist"),
    errno.ENOSPC: (
        NoSpaceError,
        "no space left on the file system: free some; once a few kilobytes are free, rtj gc gives up old checkpoints",
    ),
    errno.EDQUOT: (NoSpaceError, "the disk quota is used up: raise it, or lower the retention"),
    errno.EFBIG: (NoSpaceError, "the file system does not take files of this size"),
    errno.EROFS: (
        AccessDeniedError,
        "the file system is mounted read-only: remount it, or name another store",
    ),
    errno.EACCES: (AccessDeniedError, "permission denied: check owner and mode of the folder"),
    errno.EPERM: (
        UnsupportedStoreError,
        "the operation is not permitted; the file system may lack hard links",
    ),
    errno.EOPNOTSUPP: (
        UnsupportedStoreError,
        "the file system lacks an operation that atomic commits need (link)",
    ),
    errno.EXDEV: (UnsupportedStoreError, "the file system cannot link within one folder"),
    errno.EMLINK: (UnsupportedStoreError, "the file system lacks hard links"),
    errno.ENAMETOOLONG: (StoreError, "the name is too long for this file system"),
}


class FileStore:
    """Objects as files below `root`, made unless `make` is off. Raises BucketMissingError when it is no folder."""

    def __init__(self, root: Path, *, make: bool = True) -> None:
        self.root = root.absolute()
        self.url = f"file://{self.root}"
        if not make:
            if not self.root.is_dir():
                raise BucketMissingError(
                    f"{self.url} is not a folder of this machine: mount it, or correct --store",
                    store=self.url,
                )
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as exc:
            raise BucketMissingError(f"{self.url} is not a folder: name a folder", store=self.url) from exc
        except OSError as exc:
            raise self._error("", exc) from exc

    def get(self, key: str) -> bytes:
        return self._guard(key, lambda: self._path(key).read_bytes())

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._guard(key, lambda: self._read_range(key, offset, length))

    def head(self, key: str) -> ObjectInfo:
        def stat() -> ObjectInfo:
            path = self._path(key)
            if path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "is a folder", str(path))
            return ObjectInfo(key, path.stat().st_size)

        return self._guard(key, stat)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        self._refuse_links(folder)
        yield from self._walk(f"{folder}/" if folder else "", prefix, start_after)

    def create(self, key: str, data: bytes) -> None:
        self._guard(key, lambda: self._publish(key, memoryview(data), os.link))

    def create_large(
        self,
        key: str,
        data: memoryview,
        *,
        parallel: int = 4,  # noqa: ARG002
        hashes: Hashes | None = None,
        document: bool = False,  # noqa: ARG002
    ) -> ObjectInfo:
        if hashes is not None:
            hashes.complete()
        try:
            self._guard(key, lambda: self._publish(key, data, os.link))
        except AlreadyExistsError as exc:
            if not self._guard(key, lambda: self._equals(key, data)):
                raise ChecksumRefusedError(
                    f"{self.url}: {key} exists with other bytes; objects of a save are never rewritten",
                    store=self.url,
                    key=key,
                ) from exc
        return ObjectInfo(key, len(data))

    def put(self, key: str, data: bytes) -> None:
        self._guard(key, lambda: self._publish(key, memoryview(data), os.replace))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._refuse_links(key.rpartition("/")[0])
            self._guard(key, lambda key=key: self._path(key).unlink(missing_ok=True))  # type: ignore[misc]
        for folder in {self._path(key).parent for key in keys}:
            self._prune(folder)

    def discard_unfinished(self, prefix: str, wanted: Callable[[str], bool]) -> int:
        """Temporary files of writers that died before their link."""
        found = 0
        self._refuse_links(prefix.rpartition("/")[0])
        for path in sorted((self.root / prefix).rglob(f"{_TEMPORARY}*")):
            if wanted(f"{path.parent.relative_to(self.root).as_posix()}/"):
                self._guard(prefix, lambda path=path: path.unlink(missing_ok=True))  # type: ignore[misc]
                found += 1
                self._prune(path.parent)
        return found

    def close(self) -> None:
        """Nothing is kept open."""

    def _refuse_links(self, folder: str) -> None:
        """Raises UnsupportedStoreError when a folder below the root is a symbolic link: what is listed is deleted one
        day, and behind a link lies what is not the store's."""
        path = self.root
        for name in filter(None, folder.split("/")):
            path = path / name
            if path.is_symlink():
                raise UnsupportedStoreError(
                    f"{self.url}: {path.relative_to(self.root)} is a symbolic link, and nothing is listed or deleted "
                    "through it: put the folder itself there, or let --store name where it is",
                    store=self.url,
                    key=folder,
                )

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not key or any(p in ("", ".", "..") or p.startswith(_TEMPORARY) for p in parts):
            raise ValueError(f"{key!r} is not an object key of {self.url}")
        return self.root.joinpath(*parts)

    def _publish(self, key: str, data: memoryview, name: Callable[[Path, Path], None]) -> None:
        """Temporary file, fsync, `name` (link or replace) to the final path, fsync of the folder."""
        path = self._path(key)
        temporary = self._write_temporary(path.parent, data)
        try:
            name(temporary, path)
        except FileExistsError:
            # NFS may report its own retried LINK as EEXIST; the second link on our file tells.
            if os.stat(temporary).st_nlink != 2:
                raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        _sync_folder(path.parent)

    def _write_temporary(self, folder: Path, data: memoryview) -> Path:
        temporary = folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        self._make_folder(folder)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # a sweep has pruned the empty folder in between
            self._make_folder(folder)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _make_folder(self, folder: Path) -> None:
        """mkdir -p below the root, with each new name synced into its parent."""
        if folder.is_dir():
            return
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
            _sync_folder(new.parent)

    def _prune(self, folder: Path) -> None:
        """Remove folders that a deletion has emptied; another writer's file simply keeps its folder."""
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def _read_range(self, key: str, offset: int, length: int) -> bytes:
        with self._path(key).open("rb", buffering=0) as file:
            data = bytearray()
            while len(data) < length:
                piece = os.pread(file.fileno(), length - len(data), offset + len(data))
                if not piece:
                    raise TruncatedError(
                        f"{self.url}: {key}: asked {length} bytes at {offset}, the file ends after {len(data)}: "
                        "it is shorter than its manifest says, verify the checkpoint",
                        store=self.url,
                        key=key,
                    )
                data += piece
            return bytes(data)

    def _equals(self, key: str, data: memoryview) -> bool:
        path = self._path(key)
        if path.stat().st_size != len(data):
            return False
        with path.open("rb") as file:
            return all(file.read(_CHUNK) == data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK))

    def _walk(self, folder: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Files below `folder` ("" or ending in "/") in key order: a folder sorts as its name with a slash."""
        try:
            with os.scandir(self.root / folder) as entries:
                # Links, pipes and the like are no objects: neither shown nor followed.
                plain = [e for e in entries if not e.is_symlink() and (e.is_dir() or e.is_file())]
                names = sorted(e.name + ("/" if e.is_dir(follow_symlinks=False) else "") for e in plain)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise self._error(folder, exc) from exc
        for name in names:
            key = folder + name
            if name.startswith(_TEMPORARY) or not (key.startswith(prefix) or prefix.startswith(key)):
                continue
            if key.endswith("/"):
                if not start_after or key > start_after or start_after.startswith(key):
                    yield from self._walk(key, prefix, start_after)
            elif key > start_after and key.startswith(prefix):
                try:
                    size = os.stat(self.root / key).st_size
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    raise self._error(key, exc) from exc
                yield ObjectInfo(key, size)

    def _guard(self, key: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except FileExistsError as exc:
            raise AlreadyExistsError(f"{self.url}: {key} is occupied", store=self.url, key=key) from exc
        except OSError as exc:
            raise self._error(key, exc) from exc

    def _error(self, key: str, exc: OSError) -> StoreError:
        if not self.root.is_dir():
            return BucketMissingError(
                f"{self.url} does not exist: mount or create it", store=self.url, key=key
            )
        kind, cause = _CAUSES.get(
            exc.errno or 0, (UnavailableError, f"{exc.strerror or exc}: look at the file system's log")
        )
        return kind(f"{self.url}: {key}: {cause}", store=self.url, key=key)


def _write_all(fd: int, data: memoryview) -> None:
    view = data.cast("B") if data.nbytes else data
    while len(view):
        view = view[os.write(fd, view[:_CHUNK]) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

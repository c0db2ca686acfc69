"""The files of a folder that a framework has written: what may be kept, under which names, and where it is put again.

Only plain files below the folder are kept, by rank and relative path. What would lead out of it is refused by name:
links, absolute paths, `..`. Torch is not needed here.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainer_sidecar.train.errors import FolderRefused, FolderUnusable

PREFIX = "folder/"
MARKER = ".rtj-restored.json"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_MARKERS = (MARKER, f"{MARKER}.new")
"""In a folder that a restore has filled: the files that it has put there, and nobody else's."""


@dataclass(frozen=True)
class FoundFile:
    """A file as it was listed. `path` is relative, with slashes; `mark` tells when the file was changed since."""

    path: str
    size: int
    mark: tuple[int, ...]


@dataclass(frozen=True)
class KeptFile:
    """A file in a checkpoint: `size` bytes at `offset` of the file number `file` of the open restore point."""

    rank: int
    path: str
    size: int
    file: int = 0
    offset: int = 0


def stored_name(rank: int, path: str) -> str:
    """Of the tensor of bytes that a file is in a checkpoint."""
    return f"{PREFIX}{rank:05d}/{path}"


def told(name: str) -> tuple[int, str]:
    """(rank, relative path) of a stored name. Raises FolderRefused for one that no commit of ours has."""
    number, _, path = name.removeprefix(PREFIX).partition("/")
    if not name.startswith(PREFIX) or not number.isdecimal():
        raise FolderRefused(f"{name!r} names no file of a rank's folder")
    check_path(path)
    return int(number), path


def check_path(path: str) -> None:
    """Raises FolderRefused for a path that could lead out of the folder."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise FolderRefused(f"{path!r} is no relative path of plain names: it could lead out of the folder")


def found_files(folder: Path, ignore: Sequence[str] = (), *, otherwise: str = "") -> list[FoundFile]:
    """All files below `folder` but those that a pattern of `ignore` names (`*` also stands for slashes), by path.

    Raises FolderRefused for what is no plain file, and for a folder that cannot be listed; `otherwise` is what to do
    then, where `ignore` is not the caller's to give.
    """
    try:
        if not folder.is_dir():
            raise FolderRefused(f"{folder} is no folder: let the framework write its checkpoint first")
        return sorted(_below(folder, "", ignore, otherwise), key=lambda file: file.path)
    except OSError as error:
        raise FolderRefused(f"{folder} cannot be listed: {error}; is a rank still writing there?") from error


def _below(folder: Path, prefix: str, ignore: Sequence[str], otherwise: str) -> Iterator[FoundFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = prefix + entry.name
            if path in _MARKERS or any(fnmatch.fnmatchcase(path, pattern) for pattern in ignore):
                continue
            _refuse_name(folder, entry.name)
            advice = otherwise or f"leave it out by ignore=[{path!r}]"
            if entry.is_symlink():
                raise FolderRefused(
                    f"{entry.path} is a link to {os.readlink(entry.path)!r}: links are not followed; "
                    + (otherwise or f"put the file there instead, or {advice}")
                )
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path), path + "/", ignore, otherwise)
            elif entry.is_file(follow_symlinks=False):
                seen = entry.stat(follow_symlinks=False)
                yield FoundFile(path, seen.st_size, mark_of(seen))
            else:
                raise FolderRefused(f"{entry.path} is no file: {advice}")


def _refuse_name(folder: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise FolderRefused(f"{name!a} in {folder} is no UTF-8: give the file another name") from None


def mark_of(seen: os.stat_result) -> tuple[int, ...]:
    """Changes when a file is replaced or written to, also where its time of writing is put back (as by `cp -p`)."""
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def open_found(folder: Path, file: FoundFile) -> int:
    """A descriptor of the very file that was listed. Raises FolderRefused when it is another one by now."""
    try:
        fd = os.open(folder / file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FolderRefused(f"{folder / file.path} was listed, and cannot be read: {error}") from error
    try:
        check_same(folder, file, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_same(folder: Path, file: FoundFile, fd: int) -> None:
    """Raises FolderRefused when the open file is not as it was listed."""
    seen = os.fstat(fd)
    if not stat.S_ISREG(seen.st_mode) or mark_of(seen) != file.mark:
        raise FolderRefused(
            f"{folder / file.path} was changed while it was being kept ({file.size} bytes listed, {seen.st_size} now): "
            "commit a folder only when the framework has ended writing it, on all ranks"
        )


def check_listing(folder: Path, paths: Sequence[str], ignore: Sequence[str]) -> None:
    """Raises FolderRefused when other files lie in `folder` by now than the `paths` that were listed."""
    before, now = set(paths), {file.path for file in found_files(folder, ignore)}
    if before != now:
        path = min(before ^ now)
        how = "has come" if path in now else "is gone"
        raise FolderRefused(
            f"{folder / path} {how} while the folder was being kept: commit a folder only when the framework has ended "
            "writing it, on all ranks, or leave out by ignore=[…] what is no part of it"
        )


def digest_of(files: Sequence[FoundFile]) -> str:
    """One text for a listing, the same on every rank that sees the same folder."""
    listing = json.dumps([(file.path, file.size) for file in files])
    return hashlib.sha256(listing.encode()).hexdigest()


def make_ready(folder: Path, checkpoint_id: str, paths: Sequence[str], folders: Sequence[str] = ()) -> None:
    """Take away what an earlier restore has put into `folder`, and note what this one will: files by their `paths`, and
    `folders` directly below, whatever comes to lie in them.

    Raises FolderRefused when anything else is there: a framework could take it for a part of the checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / MARKER
    for path in _noted(marker, "files"):
        check_path(path)
        (folder / path).unlink(missing_ok=True)
        _remove_empty(folder, path)
    for name in _noted(marker, "folders"):
        check_path(name)
        remove(folder / name)
    temporary = folder / _MARKERS[1]
    temporary.unlink(missing_ok=True)  # a restore was killed between writing and renaming it
    left = sorted(name for name in os.listdir(folder) if name != MARKER)
    if left:
        raise FolderRefused(
            f"{folder} has {left[0]!r} in it, which no restore has put there: give restore_folder a folder of its own, "
            "one that the framework does not write into"
        )
    noted = {"checkpoint": checkpoint_id, "files": sorted(paths), "folders": sorted(folders)}
    temporary.write_text(json.dumps(noted))
    temporary.replace(marker)


def remove(path: Path) -> None:
    """A folder with all that is in it, or what has come into its place; nothing where nothing is. A link is removed,
    and what it leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def unusable(what: str, error: OSError, folder: Path, needed: int) -> FolderUnusable:
    """The error of a volume that does not take what a restore puts into `folder`: with the bytes that this needs in
    all, and what is free there."""
    if error.errno not in NO_SPACE:
        return FolderUnusable(f"{what}: {error}")
    free = shutil.disk_usage(folder).free
    return FolderUnusable(
        f"{what}: {error.strerror}; the whole takes {needed} bytes, {free} are free now in {folder}: free space there, "
        "or restore into a folder of another volume"
    )


def _noted(marker: Path, what: str) -> list[str]:
    try:
        document = json.loads(marker.read_text())
        return [str(path) for path in document.get(what, [])]
    except FileNotFoundError:
        return []
    except (ValueError, AttributeError, TypeError) as error:
        raise FolderRefused(f"{marker} cannot be read ({error}): remove the folder and try again") from error


def _remove_empty(folder: Path, path: str) -> None:
    """The folders on the way to a file that is gone, as long as they are empty."""
    for parent in PurePosixPath(path).parents:
        if str(parent) == ".":
            return
        try:
            (folder / parent).rmdir()
        except OSError:  # not empty, or gone with another file of it
            return

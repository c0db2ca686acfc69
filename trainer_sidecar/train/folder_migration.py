"""A named migration: the framework's own converter, run once over the restored files of all ranks, for another mesh.

The plan's mesh was admitted by the compatibility matrix before any rank started. What is decided here is who converts,
where to, and that a conversion that fails is a refused resume on all ranks, never a start from scratch.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.train.errors import FolderRefused
from trainer_sidecar.train.folder_files import NO_SPACE, FoundFile, found_files, remove, unusable

Converter = Callable[[Path, Path], object]
"""From a folder with the files of all ranks, as the framework wrote them, into an empty one."""
SOURCE = "all-ranks"
"""Folder below the restored one that a converter reads; gone after a conversion that went well."""
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")


@dataclass(frozen=True)
class Migration:
    """A migration of one restore: its name, for folder and report, and what converts."""

    name: str
    convert: Converter
    before: Mesh
    now: Mesh

    def __str__(self) -> str:
        return f"migration {self.name!r} from {self.before} to {self.now}"


@dataclass(frozen=True)
class Migrated:
    """What a conversion has left: where, how many files and bytes, and how long it took."""

    folder: Path
    files: int
    bytes: int
    seconds: float


def check_names(migrations: Mapping[str, Converter]) -> None:
    """Raises ValueError for a name that is no good name of a folder."""
    for name in migrations:
        if not _NAME.fullmatch(name) or name == SOURCE or name.startswith("rank-"):
            raise ValueError(
                f"{name!r} cannot name a migration: lower-case letters, digits, '-' and '.' (at most 63), not "
                f"{SOURCE!r} and not rank-…; for example 'deepspeed-universal'"
            )


def chosen(migrations: Mapping[str, Converter], before: Mesh, now: Mesh) -> Migration:
    """The migration of a script that offers some. Raises FolderRefused when it is not one alone."""
    if len(migrations) != 1:
        raise FolderRefused(
            f"the script offers {len(migrations)} migrations ({', '.join(sorted(migrations))}) from {before} to {now}, "
            "and nothing says which one is meant: give restore_folder the one for this change of mesh"
        )
    ((name, convert),) = migrations.items()
    return Migration(name, convert, before, now)


def migrate(migration: Migration, folder: Path, folders: Sequence[Path]) -> Migrated:
    """Convert what lies in `folders` into `folder/<name>`; by one rank of those that have `folder`.

    The input is removed after a conversion that went well. Raises FolderRefused with what the converter has said;
    FolderUnusable where there is no space.
    """
    begin = time.monotonic()
    source, target = folder / SOURCE, folder / migration.name
    size = sum(file.size for at in folders for file in found_files(at))
    try:
        _join(folders, source)
        target.mkdir()
    except OSError as error:
        raise unusable(
            f"the input of {migration} cannot be put into {source}", error, folder, size
        ) from error
    try:
        migration.convert(source, target)
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            what = f"{migration} failed while it wrote into {target}"
            raise unusable(what, error, folder, size) from error
        raise FolderRefused(
            f"{migration} failed: {type(error).__name__}: {error}; its input lies in {source}: repair the converter "
            f"and start again, or resume on {migration.before}"
        ) from error
    files = _result(migration, target)
    if not files:
        raise FolderRefused(
            f"{migration} wrote no file into {target}: the converter gets (source, target) and writes into the second"
        )
    for spent in (source, *folders):
        remove(spent)  # a converter may have moved it, or parts of it
    return Migrated(target, len(files), sum(file.size for file in files), time.monotonic() - begin)


def _result(migration: Migration, target: Path) -> list[FoundFile]:
    """What a converter has left. Raises FolderRefused for what a framework would not find there again."""
    if target.is_symlink() or not target.is_dir():
        how = "put a link in the place of" if target.is_symlink() else "removed"
        raise FolderRefused(
            f"{migration} has {how} {target}: the converter gets (source, target) and writes files into the second, "
            "which it must leave where it is"
        )
    try:
        return found_files(target, otherwise="let the converter write files alone into its target")
    except FolderRefused as error:
        raise FolderRefused(f"{migration} has left what is not taken: {error}") from error


def _join(folders: Sequence[Path], target: Path) -> None:
    """One folder with the files of all. Raises FolderRefused for two of one path that are not the same."""
    target.mkdir()
    for folder in folders:
        for file in found_files(folder):
            one, other = folder / file.path, target / file.path
            try:
                other.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise _unlike(folder, file, "lies in a folder that is a file") from None
            if other.is_dir():
                raise _unlike(folder, file, "is a file, and a folder")
            if not other.exists():
                _link(one, other)
            elif not filecmp.cmp(one, other, shallow=False):
                raise _unlike(folder, file, "is another file than that")


def _unlike(folder: Path, file: FoundFile, how: str) -> FolderRefused:
    return FolderRefused(
        f"{file.path!r} of {folder.name} {how} of the ranks before it: a converter needs one folder with the files of "
        "all; use restore_folder(…, all_ranks=True) and join them there"
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        shutil.copyfile(source, target)  # a file system without hard links

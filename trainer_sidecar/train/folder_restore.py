"""From a committed checkpoint back to the files of a framework's folder: proven by the sidecar, written in pieces.

On the mesh that saved, a rank gets the files of its own folder. On another one they mean nothing to the framework
before its converter has run: then nothing is restored, unless the script gives that converter as a named migration, or
asks for the files of all ranks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import OwnFolders, Slices, Witness
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.train import fingerprint_policy
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import FolderRefused, ResumeRefused, SidecarRefused
from trainer_sidecar.train.folder_files import KeptFile, make_ready, told, unusable
from trainer_sidecar.train.folder_migration import SOURCE, Converter, Migrated, Migration, chosen, migrate
from trainer_sidecar.train.folder_sharing import dealt, key_of, meet, meet_after
from trainer_sidecar.train.sidecar_client import LONG_REPLY_SECONDS

log = logging.getLogger("rtj.train")
_T = TypeVar("_T")
_FETCH = 64 * 1024 * 1024
"""Bytes asked of the sidecar at a time."""
_PIECE = 8 * 1024 * 1024


@dataclass(frozen=True)
class RestoredFolder:
    """What lies in the restored folder now."""

    checkpoint_id: str
    step: int
    samples: int
    folders: dict[int, Path]
    """Where the files of each saved folder are, by the first of the ranks that had it: with `all_ranks` one folder
    `rank-<rank:05d>` for each, else all in the folder itself; after a migration in what it has written."""
    path: Path
    """What the framework loads: the restored folder, or what a migration has written."""
    migration: str = ""
    """Name of the migration that was run; empty: the files are as they were saved."""


@dataclass(frozen=True)
class FolderResumed:
    """The same for the session: with the report, and what the steps after it are compared with."""

    restored: RestoredFolder
    opened: m.RestoreOpened
    report: ResumeReport

    @property
    def witness(self) -> Witness | None:
        return self.opened.witness

    @property
    def saved_epoch(self) -> int:
        return self.opened.manifest.epoch

    @property
    def loss_spread(self) -> float:
        return self.opened.manifest.training_state.statistics.get("lossStd", 0.0)


@dataclass
class FolderRestorer:
    """One restore of the plan's restore point into `folder`."""

    env: Environment
    agreement: Agreement
    fingerprints: Mapping[str, str]
    accept: Sequence[str]
    folder: Path
    all_ranks: bool
    shared: bool
    migrations: Mapping[str, Converter] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _migration: Migration | None = None

    def restore(self, point: RestorePoint) -> FolderResumed:
        """Raises ResumeRefused when the checkpoint does not fit, cannot be read, or the folder is not its own;
        FolderUnusable for a volume that does not take it, as when it is full."""
        begin = time.monotonic()
        try:
            opened = self._timed("open", lambda: self._open(point))
            kept = self._compare(opened)
            slices = self.env.client.ask(m.AskSlices(), m.SlicesReply).slices
            files = kept_files(opened, slices)
            fetched = self._put(opened, kept, files)
            migrated = self._migrate(kept)
        except (SidecarRefused, FolderRefused) as error:
            raise ResumeRefused([f"{error} (checkpoint {point.checkpoint_id})"]) from error
        progress = opened.manifest.progress
        self.seconds["total"] = round(time.monotonic() - begin, 4)
        path, name = self.folder, ""
        if self._migration is not None:
            name = self._migration.name
            path = self.folder / name
        restored = RestoredFolder(
            point.checkpoint_id, progress.step, progress.samples, self._folders(kept, path), path, name
        )
        return FolderResumed(restored, opened, self._report(opened, len(files), fetched, migrated))

    def _folders(self, kept: OwnFolders, path: Path) -> dict[int, Path]:
        leaders = sorted(set(kept.leaders))
        if self.all_ranks:
            return {leader: self._below(leader) for leader in leaders}
        if self._migration is not None:
            return dict.fromkeys(leaders, path)
        mine = {kept.leaders[r] for r in self._sharing.members(self.env.rank)}
        return {leader: path for leader in leaders if leader in mine}

    @property
    def _whole(self) -> bool:
        """Every folder gets the files of all ranks."""
        return self.all_ranks or self._migration is not None

    def _timed(self, phase: str, action: Callable[[], _T]) -> _T:
        begin = time.monotonic()
        result = action()
        self.seconds[phase] = round(time.monotonic() - begin, 4)
        return result

    def _open(self, point: RestorePoint) -> m.RestoreOpened:
        request = m.OpenRestore(checkpoint_id=point.checkpoint_id)
        return self.env.client.ask(request, m.RestoreOpened, seconds=LONG_REPLY_SECONDS)

    def _compare(self, opened: m.RestoreOpened) -> OwnFolders:
        manifest, plan = opened.manifest, self.env.plan
        kept = manifest.training_state.folders
        if kept is None:
            raise ResumeRefused(
                [
                    f"checkpoint {manifest.checkpoint_id} holds tensors, no folders of a framework: it was saved by a "
                    "Session or by dcp.save, and is restored by them"
                ]
            )
        changed = fingerprint_policy.differences(
            manifest.fingerprints, self.fingerprints, plan.fingerprints, self.accept
        )
        found = [str(d) for d in changed if d.stops]
        before, now = manifest.topology.mesh, plan.topology.mesh
        if before != now and self.migrations:
            self._migration = chosen(self.migrations, before, now)
        elif before != now and not self.all_ranks:
            found.append(
                f"mesh: the folders of checkpoint {manifest.checkpoint_id} were written on {before}, this attempt has "
                f"{now}, and only the framework's own converter can make one of the other: resume on {before}, or let "
                "the script give that converter by its name, restore_folder(…, migrations={'deepspeed-universal': "
                "convert}), or ask for restore_folder(…, all_ranks=True) and run it itself"
            )
        if found:
            raise ResumeRefused(found)
        self._changed = [d for d in changed if not d.stops]
        for difference in self._changed if self.env.rank == 0 else ():
            log.warning("%s", difference)
        return kept

    def _below(self, leader: int) -> Path:
        return self.folder / f"rank-{leader:05d}" if self._whole else self.folder

    def _put(self, opened: m.RestoreOpened, kept: OwnFolders, files: list[KeptFile]) -> int:
        """Fetch and write this rank's share of the files; returns the bytes read from the store."""
        self._sharing = meet(self.agreement, self._look)
        members = self._sharing.members(self.env.rank)
        wanted: dict[str, KeptFile] = {}

        def prepare() -> tuple[str, str]:
            wanted.update(self._wanted(kept, files, members))
            if members[0] == self.env.rank:  # it empties the folder of what an earlier restore has put there
                written = [SOURCE, self._migration.name] if self._migration else []
                make_ready(self.folder, opened.manifest.checkpoint_id, list(wanted), written)
            return str(self.env.rank), ""

        meet(self.agreement, prepare)
        mine = dealt(list(wanted.items()), members, self.env.rank, lambda item: item[1].size)
        fetched = self._timed("fetch", lambda: self._fetch(opened, mine))
        self.agreement.barrier()  # the folder is whole on every rank that has it
        # before a migration, which may take long and needs no window
        self.env.client.tell(m.CloseRestore(rank=self.env.rank))
        return fetched

    def _fetch(self, opened: m.RestoreOpened, mine: Sequence[tuple[str, KeptFile]]) -> int:
        """This rank's share of the files; returns the bytes read from the store. Raises FolderUnusable on all ranks
        alike; SidecarRefused, which says more than its sentence, where it was met."""
        source = [Path(opened.folder) / name for name in opened.files]
        fetched, refused = [0], list[SidecarRefused]()

        def fetch() -> tuple[str, str]:
            for at, kept in mine:
                try:
                    fetched.append(self._write(self.folder / at, kept, source))
                except SidecarRefused as error:
                    refused.append(error)
                    break
                except OSError as error:
                    needed = sum(file.size for _, file in mine)
                    raise unusable(
                        f"{self.folder / at} cannot be written", error, self.folder, needed
                    ) from error
            return str(self.env.rank), ""

        meet(self.agreement, fetch)
        if refused:
            raise refused[0]
        return sum(fetched)

    def _migrate(self, kept: OwnFolders) -> Migrated | None:
        """Run the migration, if there is one, by the first rank of each folder; the others wait as long as that takes.
        None on those."""
        migration, done = self._migration, list[Migrated]()
        if migration is None:
            return None

        def convert() -> tuple[str, str]:
            if self._sharing.members(self.env.rank)[0] == self.env.rank:
                log.warning("%s runs", migration)
                folders = [self._below(leader) for leader in sorted(set(kept.leaders))]
                done.append(migrate(migration, self.folder, [at for at in folders if at.exists()]))
            return str(self.env.rank), ""

        self._timed("migrate", lambda: meet_after(self.agreement, convert))
        return done[0] if done else None

    def _look(self) -> tuple[str, str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return key_of(self.env, self.folder, shared=self.shared), ""

    def _wanted(self, kept: OwnFolders, files: list[KeptFile], members: list[int]) -> dict[str, KeptFile]:
        """Files for the folder of `members`, by their path in it. Raises FolderRefused for two of one path."""
        leaders = set(kept.leaders) if self._whole else {kept.leaders[rank] for rank in members}
        wanted: dict[str, KeptFile] = {}
        for file in files:
            leader = kept.leaders[file.rank]
            if leader not in leaders:
                continue
            path = f"rank-{leader:05d}/{file.path}" if self._whole else file.path
            if (other := wanted.setdefault(path, file)) is not file:
                raise FolderRefused(
                    f"rank {other.rank} and rank {file.rank} each have a {path!r} of their own, and {self.folder} is "
                    "one folder for both: give each rank a folder of its own, as at the save"
                )
        return wanted

    def _write(self, target: Path, kept: KeptFile, source: list[Path]) -> int:
        """One file, piece by piece out of the verified window."""
        target.parent.mkdir(parents=True, exist_ok=True)
        fetched = 0
        try:
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileExistsError as error:
            raise FolderRefused(
                f"{target} was made by somebody else while the folder was restored: is it one folder of several pods? "
                "Then give shared=True"
            ) from error
        try:
            for at in range(0, kept.size, _FETCH):
                piece = (kept.offset + at, min(_FETCH, kept.size - at))
                request = m.Fetch(file=kept.file, ranges=[piece])
                reply = self.env.client.ask(request, m.Fetched, seconds=LONG_REPLY_SECONDS)
                fetched += reply.bytes_from_store
                _copy(source[kept.file], *piece, fd)
        finally:
            os.close(fd)
        return fetched

    def _report(
        self, opened: m.RestoreOpened, files: int, fetched: int, migrated: Migrated | None
    ) -> ResumeReport:
        plan, manifest = self.env.plan, opened.manifest
        (fetched,) = self.agreement.sum_exact([fetched])
        derived = list[str]()
        if migrated is not None and self._migration is not None:
            derived = [
                f"{self._migration}: {files} files were made {migrated.files} files of {migrated.bytes} bytes in "
                f"{migrated.seconds:.1f} s"
            ]
        if self.all_ranks:
            derived = [
                f"files of all {manifest.topology.mesh.world_size} ranks ({manifest.topology.mesh}) were handed out "
                f"for the framework's own converter to {plan.topology.mesh}"
            ]
        return ResumeReport(
            epoch=plan.epoch,
            attempt=plan.attempt,
            checkpoint_id=manifest.checkpoint_id,
            step=manifest.progress.step,
            topology_from=manifest.topology,
            topology_to=plan.topology,
            checks=[
                Check(
                    name="files",
                    passed=True,
                    expected=files,
                    found=files,
                    detail="each byte by its hash leaf",
                ),
                *(d.check() for d in self._changed),
            ],
            resharded=manifest.topology.mesh != plan.topology.mesh,
            derived=derived,
            bytes_needed=manifest.bytes,
            bytes_fetched=fetched,
            seconds=self.seconds,
        )


def kept_files(opened: m.RestoreOpened, slices: Slices) -> list[KeptFile]:
    """The files of an open checkpoint, by name. Raises FolderRefused for what no commit of a folder has."""
    rows: dict[int, list[int]] = {}
    for row, tensor in enumerate(slices.tensor):
        rows.setdefault(tensor, []).append(row)
    table, files = opened.tensors, []
    for tensor, (name, dtype, shape) in enumerate(zip(table.names, table.dtypes, table.shapes, strict=True)):
        rank, path = told(name)
        size, mine = shape[0] if len(shape) == 1 else -1, rows.get(tensor, [])
        if dtype != "uint8" or sum(slices.length[row] for row in mine) != size or len(mine) > 1:
            raise FolderRefused(f"{name} is {dtype}{shape} in {len(mine)} slices: no file of a folder")
        where = (slices.file[mine[0]], slices.offset[mine[0]]) if mine else (0, 0)
        files.append(KeptFile(rank, path, size, *where))
    return files


def _copy(window: Path, offset: int, length: int, target: int) -> None:
    """Bytes that the sidecar has proven, from its window to the end of an open file."""
    source = os.open(window, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while length:
            data = memoryview(os.pread(source, min(_PIECE, length), offset))
            if not data:
                raise FolderRefused(f"{window} ends at byte {offset}: the sidecar has removed it")
            offset, length = offset + len(data), length - len(data)
            while data:
                data = data[os.write(target, data) :]
    finally:
        os.close(source)

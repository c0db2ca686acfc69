"""The folder that a demo writes into: one that a demo has made, for one demo at a time, emptied once it can begin.

The report of the run before is moved aside then, and goes when there is a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hack.demo.settings import ROOT, DemoError

DEFAULT = ROOT / "demo-out"
MARK = ".rtj-demo"
PREVIOUS = "previous"
REPORT = ("report.json", "loss.png")
"""What outlives the start of the next run."""


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The folder with the demo's mark, for this process alone; nothing else in it is touched. Raises DemoError for one
    that no demo has made, and for one that another demo writes into by now."""
    if folder.exists() and not _may_go(folder):
        raise DemoError(
            f"--out {folder} is not empty and no demo has made it (no file {MARK} there), and the demo would empty it: "
            "name a new folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / MARK).open("a+") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            mark.seek(0)
            raise DemoError(
                f"--out {folder} is in use ({mark.read().strip()}): name another folder for this demo, or wait"
            ) from error
        mark.truncate(0)
        mark.write(
            f"made by hack/demo, which empties this folder when it is run again; process {os.getpid()}\n"
        )
        mark.flush()
        yield


def make_anew(folder: Path) -> bool:
    """Empty a claimed folder, but for the report of the run before, which is moved to `previous`; whether there is
    one."""
    previous = folder / PREVIOUS
    if reports := [folder / name for name in REPORT if (folder / name).is_file()]:
        shutil.rmtree(previous, ignore_errors=True)
        previous.mkdir()
        for path in reports:
            path.rename(previous / path.name)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path != previous:
                shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    return previous.is_dir()


def drop_previous(folder: Path) -> None:
    """There is a new report."""
    shutil.rmtree(folder / PREVIOUS, ignore_errors=True)


def _may_go(folder: Path) -> bool:
    """The default one is the demo's by its name: earlier versions left no mark."""
    if not folder.is_dir():
        return False
    return folder == DEFAULT or (folder / MARK).is_file() or not any(folder.iterdir())

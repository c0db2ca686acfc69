"""The folder that a demo writes into: emptied at the start, so it must be one that a demo has made."""

from __future__ import annotations

import shutil
from pathlib import Path

from hack.demo.settings import ROOT, DemoError

DEFAULT = ROOT / "demo-out"
MARK = ".rtj-demo"


def make_anew(folder: Path) -> None:
    """An empty folder with the demo's mark. Raises DemoError rather than delete what no demo has written."""
    if folder.exists() and not _may_go(folder):
        raise DemoError(
            f"--out {folder} is not empty and no demo has made it (no file {MARK} there), and the demo would empty it: "
            "name a new folder"
        )
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).write_text("made by hack/demo, which deletes this folder when it is run again\n")


def _may_go(folder: Path) -> bool:
    """The default one is the demo's by its name: earlier versions left no mark."""
    if not folder.is_dir():
        return False
    return folder == DEFAULT or (folder / MARK).is_file() or not any(folder.iterdir())

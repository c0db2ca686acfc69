"""Compiles `trainer_sidecar/train/mix.c` into the wheel, and into the checkout for an editable install.

Without a C compiler the wheel is one of pure Python: nothing is missing, digests of the state take five times as long.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "trainer_sidecar/train"


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch's `custom` hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Makes the library before the files are packed."""
        if self.target_name != "wheel":
            return
        library = Path(self.root) / FOLDER / "libmix.so"
        if not compiled(Path(self.root) / FOLDER / "mix.c", library):
            return
        build_data["artifacts"].append(f"/{FOLDER}/libmix.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compiled(source: Path, library: Path) -> bool:
    """Whether the library could be made. One that stands there is replaced whole or not at all."""
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    found = shutil.which(words[0])
    if found is None:
        print(f"no C compiler ({words[0]}): {source.name} is left out", file=sys.stderr)
        library.unlink(missing_ok=True)  # of older sources, perhaps
        return False
    made = library.with_suffix(f".{os.getpid()}")
    command = [found, *words[1:], "-O3", "-std=gnu11", "-shared", "-fPIC", "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{shlex.join(command)}: {done.stderr}", file=sys.stderr)
        library.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
        return False
    made.replace(library)
    return True

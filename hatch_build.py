"""Compiles `trainer_sidecar/train/mix.c` into the wheel, and into the checkout for an editable install.

On Linux with glibc, for the machine at hand. Elsewhere, in a cross build and without a C compiler the wheel is one of
pure Python: nothing is missing, digests of the state take five times as long.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "trainer_sidecar/train"
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-nostartfiles", "-nodefaultlibs")
"""Nothing of the C library is linked, so that the oldest one will do."""


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
        build_data["tag"] = f"py3-none-manylinux_2_17_{platform.machine()}"


def compiled(source: Path, library: Path) -> bool:
    """Whether the library could be made. One that stands there is replaced whole or not at all."""
    try:
        words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError:
        words = [os.environ["CC"]]
    found = shutil.which(words[0])
    if not _for_this_machine() or found is None:
        why = f"no C compiler ({words[0]})" if found is None else "not for this machine, or not glibc"
        print(f"{source.name} is left out: {why}", file=sys.stderr)
        library.unlink(missing_ok=True)  # of older sources, perhaps
        return False
    made = library.with_suffix(f".{os.getpid()}")
    command = [found, *words[1:], *FLAGS, "-o", str(made), str(source), "-lgcc"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not made.exists():
        print(f"{shlex.join(command)}: {done.stderr}", file=sys.stderr)
        library.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
        return False
    made.replace(library)
    return True


def _for_this_machine() -> bool:
    glibc = platform.libc_ver()[0] == "glibc"
    return glibc and sysconfig.get_platform() == f"linux-{platform.machine()}"

"""Which code trains: git commit, digest of what differs from it, the script's own digest, versions of packages.

Recorded with every checkpoint and shown when it differs; by default it refuses nothing, since a corrected bug is the
usual reason for a new attempt. Never fails: what cannot be told is left out.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger("rtj.train")
PACKAGES = (
    *("torch", "numpy", "transformers", "tokenizers", "peft", "datasets", "accelerate", "trl"),
    *("torchdata", "torchtitan", "lightning", "flash-attn", "bitsandbytes", "triton"),
)
ENV_CODE_VERSION = "RTJ_CODE_VERSION"
"""Commit that an image was built from, for images without git."""
_GIT_SECONDS = 5.0
_MAX_UNTRACKED = 200


def code_version(env: Mapping[str, str] = os.environ, script: Path | None = None) -> dict[str, str]:
    """`code.commit`, `code.dirty`, `code.script`, `package.<name>`, as far as known."""
    script = script or Path(sys.argv[0])
    found = {f"package.{name}": version for name in PACKAGES if (version := _installed(name))}
    found["package.python"] = platform.python_version()
    if script.is_file():
        found["code.script"] = "sha256:" + hashlib.sha256(script.read_bytes()).hexdigest()
        found.update(git_version(script.resolve().parent))
    if env.get(ENV_CODE_VERSION):
        found["code.commit"] = env[ENV_CODE_VERSION]
    return found


def git_version(folder: Path) -> dict[str, str]:
    """Commit of the repository around `folder`, and a digest of its uncommitted changes (`clean` without any)."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    version = {"code.commit": commit.decode().strip()}
    changes, untracked = (
        _git(folder, "diff", "HEAD"),
        _git(folder, "ls-files", "-o", "--exclude-standard", "*.py"),
    )
    if changes is not None and untracked is not None:
        digest = hashlib.sha256(changes)
        for name in sorted(untracked.decode(errors="replace").splitlines())[:_MAX_UNTRACKED]:
            path = folder / name
            digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
        version["code.dirty"] = f"sha256:{digest.hexdigest()}" if changes or untracked else "clean"
    return version


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of git, None when there is no git, no repository, or no answer in time."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.debug("git %s: %s", arguments[0], error)
        return None
    return done.stdout if done.returncode == 0 else None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

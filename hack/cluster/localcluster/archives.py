"""Packs a folder as a container image archive (docker format) without a container tool, and reads their names."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

Filter = Callable[[tarfile.TarInfo], tarfile.TarInfo | None]


def pack(
    root: Path, reference: str, config: dict[str, object], archive: Path, keep: Filter | None = None
) -> None:
    """Write `archive`, an image of one layer with the files of `root`; `keep` may drop or change members."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    layer = archive.with_suffix(f".{os.getpid()}.layer")
    with tarfile.open(layer, "w") as members:
        members.add(root, arcname=".", filter=keep)
    with layer.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    described = json.dumps(_description(config, digest))
    name = hashlib.sha256(described.encode()).hexdigest() + ".json"
    manifest = json.dumps([{"Config": name, "RepoTags": [reference], "Layers": ["layer.tar"]}])
    draft = archive.with_suffix(f".{os.getpid()}.draft")
    with tarfile.open(draft, "w") as members:
        _add(members, name, described)
        members.add(layer, arcname="layer.tar")
        _add(members, "manifest.json", manifest)
    layer.unlink()
    draft.rename(archive)


def tags(archive: Path) -> set[str]:
    """Names that a docker archive gives its images; none for an archive of another format."""
    with tarfile.open(archive) as members:
        try:
            described = members.extractfile("manifest.json")
        except KeyError:
            return set()
        manifest = json.load(described) if described else []
    return {tag for image in manifest for tag in image.get("RepoTags") or []}


def _description(config: dict[str, object], digest: str) -> dict[str, object]:
    created = "1970-01-01T00:00:00Z"
    return {
        "architecture": _ARCHITECTURES.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "created": created,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        # One entry for each layer, or builders refuse to build on the image.
        "history": [{"created": created, "created_by": "hack/cluster"}],
    }


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    archive.addfile(member, io.BytesIO(text.encode()))

"""Makes the container images of the cluster and of the project without any image registry.

The pause image is one static C program. The base image is a minimal Debian with Python, made by
debootstrap. The project's images are built on it by buildah with chroot isolation, in a store of
their own below the cache. What the host knows about package indexes (pip's settings, CA bundle, proxy
variables) is handed to a build as mounts and is not part of any image.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localcluster import archives, inputs
from localcluster.commands import mount_points, run, stream, succeeds
from localcluster.node import PAUSE_IMAGE
from localcluster.settings import ClusterError, Settings

SUITE = "bookworm"
BASE_PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
BASE_IMAGE = "localhost/rtj-base:" + hashlib.sha256(repr((2, SUITE, BASE_PACKAGES)).encode()).hexdigest()[:12]
# A name that manifests can use whatever the key is.
BASE_IMAGE_ALIAS = "localhost/rtj-base:dev"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_PAUSE_SOURCE = Path(__file__).with_name("pause.c")


@dataclass(frozen=True)
class Build:
    """One target of a Dockerfile to build as image `tag`."""

    tag: str
    target: str
    context: Path
    dockerfile: Path


def pause_archive(settings: Settings) -> Path:
    """The archive of the pause image, made when there is none."""
    digest = hashlib.sha256(_PAUSE_SOURCE.read_bytes()).hexdigest()[:12]
    archive = settings.images / f"pause-{digest}.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as folder:
            run(["gcc", "-static", "-O2", "-o", f"{folder}/pause", str(_PAUSE_SOURCE)])
            archives.pack(Path(folder), PAUSE_IMAGE, {"Entrypoint": ["/pause"]}, archive)
    return archive


def base_archive(settings: Settings) -> Path:
    """The archive of the base image (Python 3.11, pip, venv, CA certificates), made when there is none."""
    archive = settings.images / f"base-{BASE_IMAGE.rpartition(':')[2]}.tar"
    if not archive.exists():
        settings.images.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=settings.images, prefix="base-") as folder:
            root = Path(folder) / "root"
            _debootstrap(root)
            archives.pack(root, BASE_IMAGE_ALIAS, {"Cmd": ["python3"]}, archive, keep=_keep_in_base)
    return archive


def _debootstrap(root: Path) -> None:
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}", SUITE, str(root)]
    mirror = debian_mirror(_apt_sources())
    print(f"debootstrap {SUITE} (about 40 s) ...", file=sys.stderr, flush=True)
    stream([*argv, mirror] if mirror else argv)


def _apt_sources() -> str:
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*.list")]
    files += Path("/etc/apt/sources.list.d").glob("*.sources")
    return "\n".join(path.read_text() for path in files if path.exists())


def debian_mirror(sources: str) -> str | None:
    """The first Debian archive that apt's source lists name, in the one-line or the deb822 form."""
    pattern = re.compile(r"^(?:URIs:|deb\s+(?:\[[^\]]*\]\s+)?)\s*(\S+/debian/?)(?:\s|$)", re.MULTILINE)
    found = pattern.search(sources)
    return found.group(1) if found else None


_DROPPED = re.compile(
    r"\./(?:dev|proc|sys|run|tmp|var/cache/apt|var/lib/apt/lists|var/log|usr/share/(?:doc|man|locale))/.+"
)
# The bootstrap writes the mirror it used here, and that is the host's affair.
_HOST_FILES = {"./etc/apt/sources.list", "./etc/resolv.conf", "./etc/hostname"}


def _keep_in_base(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _DROPPED.fullmatch(member.name) or member.name in _HOST_FILES else member


def build(settings: Settings, wanted: Build) -> Path:
    """The docker archive of one image, below the cache; built unless it was made from the same inputs."""
    with _only_builder(settings):
        made_from = inputs.digest(wanted.context, wanted.dockerfile, BASE_IMAGE, wanted.target, wanted.tag)
        archive = settings.images / (re.sub(r"[^A-Za-z0-9.]+", "-", wanted.tag) + ".tar")
        note = archive.with_suffix(".inputs")
        if made_from and archive.exists() and note.exists() and note.read_text() == made_from:
            print(f"{wanted.tag}: nothing that it is made from has changed", file=sys.stderr, flush=True)
            return archive
        note.unlink(missing_ok=True)
        _build(settings, wanted)
        _export(settings, wanted.tag, archive)
        # What was read before the build: a file that changed meanwhile makes for another build next time.
        note.write_text(made_from or "")
        return archive


def _build(settings: Settings, wanted: Build) -> None:
    argv = [*_buildah(settings), "build", "--isolation=chroot", "--layers", "--pull-never"]
    argv += [
        f"--build-arg=BASE_IMAGE={BASE_IMAGE_ALIAS}",
        f"--tag={wanted.tag}",
        f"--file={wanted.dockerfile}",
    ]
    argv += [f"--target={wanted.target}"] if wanted.target else []
    with _host_settings() as mounts:
        _ensure_base(settings)
        try:
            stream([*argv, *mounts, str(wanted.context)])
        finally:
            _tidy_store(settings)


@contextmanager
def _only_builder(settings: Settings) -> Iterator[None]:
    """One build at a time: the tidying after one would take away the working containers of another."""
    settings.cache.mkdir(parents=True, exist_ok=True)
    with (settings.cache / "buildah.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tidy_store(settings: Settings) -> None:
    """Remove the working containers of a failed build and the mounts of the store."""
    run([*_buildah(settings), "rm", "--all"])
    for point in sorted(mount_points(), reverse=True):
        if point.startswith(f"{settings.cache}/buildah/"):
            run(["umount", point])


def _export(settings: Settings, tag: str, archive: Path) -> None:
    draft = archive.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    run([*_buildah(settings), "push", tag, f"docker-archive:{draft}:{tag}"])
    draft.rename(archive)


def _ensure_base(settings: Settings) -> None:
    """Have the base image of this table in buildah's store, under its alias."""
    buildah = _buildah(settings)
    if not succeeds([*buildah, "inspect", "--type=image", BASE_IMAGE]):
        run([*buildah, "pull", f"docker-archive:{base_archive(settings)}"])
        run([*buildah, "tag", BASE_IMAGE_ALIAS, BASE_IMAGE])
    run([*buildah, "tag", BASE_IMAGE, BASE_IMAGE_ALIAS])


def _buildah(settings: Settings) -> list[str]:
    if shutil.which("buildah") is None:
        raise ClusterError(
            "buildah is missing; `python3 hack/cluster build` tells the Debian packages to install"
        )
    store = settings.cache / "buildah"
    return ["buildah", f"--root={store}/storage", f"--runroot={store}/run", "--storage-driver=overlay"]


@contextmanager
def _host_settings() -> Iterator[list[str]]:
    """Mounts that let package installers inside a build reach what the host's installers reach."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "pip.conf"
        config.write_text(pip_config(_pip_settings(), os.environ))
        mounts = [f"--volume={config}:/etc/pip.conf:ro"]
        if CA_BUNDLE.exists():
            mounts.append(f"--volume={CA_BUNDLE}:{CA_BUNDLE}:ro")
        yield mounts


def _pip_settings() -> str:
    try:
        return run([sys.executable, "-m", "pip", "config", "list"])
    except ClusterError:
        return ""


_PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "timeout", "default-timeout", "proxy", "retries")


def pip_config(listed: str, environ: Mapping[str, str]) -> str:
    """A pip.conf from the output of `pip config list` and the ``PIP_`` variables, the latter winning.

    Only what concerns the index is taken: paths of the host mean nothing inside a build, but for the
    CA bundle, which is mounted at its own path.
    """
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = value.strip("'\"")
    for option in _PIP_KEYS:
        if given := environ.get("PIP_" + option.upper().replace("-", "_")):
            found[option] = given
    lines = ["[global]", *(f"{option} = {found[option]}" for option in _PIP_KEYS if option in found)]
    if CA_BUNDLE.exists():
        lines.append(f"cert = {CA_BUNDLE}")
    return "\n".join(lines) + "\n"

"""The sidecar's side of the shared volume: folders, atomic files, the launcher.

Everything there may also be written by the trainer under another user (operator.md O23). So nothing is believed
without a check, links are not followed, and no read is larger than it may be.
"""

import io
import os
import socket
import stat
import tempfile
import zipfile
from pathlib import Path

import trainer_sidecar
from trainer_sidecar.contract.volume import Volume

_FOLDERS = ("", "plan", "order", "stage", "outcome", "restore")


def prepare(volume: Volume) -> None:
    """Make `w/` and its folders, mode 0777 and not sticky. Raises OSError naming the folder."""
    for name in _FOLDERS:
        folder = volume.work / name
        folder.mkdir(parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) != 0o777:
            folder.chmod(0o777)


def launcher_listens(volume: Volume) -> bool | None:
    """False: the launcher has listened and does not any more, it has ended or was killed. None before it has begun."""
    try:
        folder = os.open(volume.work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
            # By the folder's descriptor: a path can exceed the 108 bytes of an address.
            door.connect(f"/proc/self/fd/{folder}/{volume.launcher_socket.name}")
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    finally:
        os.close(folder)
    return True


def write_file(path: Path, data: bytes) -> None:
    """Replace `path` by rename: readers see the old or the new file, never a piece. Mode 0666."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(temporary, 0o666)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_file(path: Path, limit: int) -> bytes:
    """All bytes of an ordinary file. Raises FileNotFoundError; ValueError for a link, a special file, above `limit`."""
    handle = open_plain(path, os.O_RDONLY)
    with os.fdopen(handle, "rb") as source:
        data = source.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than its limit of {limit} bytes")
    return data


def open_plain(path: Path, flags: int) -> int:
    """File descriptor of an ordinary file. Links are refused: the trainer must not make us read our own secrets."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise ValueError(f"{path} cannot be opened as an ordinary file: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is not an ordinary file")
    return handle


def install_launcher(volume: Volume) -> bool:
    """Put `rtj-launch.pyz` into the volume by rename. False when this installation holds no launcher."""
    source = Path(trainer_sidecar.__file__).parent / "launch.py"
    if not source.is_file():
        return False
    archive = io.BytesIO(b"#!/usr/bin/env python3\n")
    archive.seek(0, io.SEEK_END)
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("__main__.py", source.read_bytes())
    write_file(volume.launcher, archive.getvalue())
    volume.launcher.chmod(0o755)
    return True

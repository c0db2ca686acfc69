"""A restore takes nothing of the last of the shared volume, and says which volume is too small for what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_sidecar.contract.restore_fault import Refusal, kind_of_refusal
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar.metrics import Metrics
from trainer_sidecar.sidecar.restores import Restores
from trainer_sidecar.sidecar.room import RESERVE_BYTES, Room, VolumeFullError
from trainer_sidecar.sidecar.server import RequestError

MIB = 1024 * 1024
IN_A_SMALL_VOLUME = """
import os, sys
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
from trainer_sidecar.sidecar.room import Room, VolumeFullError
from trainer_sidecar.sidecar.window import Window
sys.path.insert(0, sys.argv[2])
from test_window import hashed
from trainer_sidecar.contract.checkpoint import leaf_hashes
from trainer_sidecar.contract.keys import LEAF_SIZE
folder, data = Path(sys.argv[1]), bytes(range(256)) * (12 * 4096)  # 12 MiB in 20 MiB
room = Room(folder, "the-checkpoint")
room.needed = 2 * len(data)
shard = hashed(data, LEAF_SIZE)
broken = [True]
def read(_key, offset, length):
    if offset == 0 and broken:
        broken.clear()
        raise ConnectionError("away")
    return data[offset : offset + length]
one, two = (Window(folder / name, name, shard, lambda: leaf_hashes(data, LEAF_SIZE), room) for name in "ab")
with ThreadPoolExecutor(4) as pool:
    try:
        one.fetch([(0, len(data))], read, pool)
    except ConnectionError:
        print("away")
    one.fetch([(0, len(data))], read, pool)  # pages that a failed read has left behind are not counted twice
    assert (folder / "a").read_bytes() == data
    two.fetch([(0, 6 * 2**20)], read, pool)
    try:
        two.fetch([(0, len(data))], read, pool)
    except VolumeFullError as exc:
        print(exc)
(folder / "outcome.json").write_bytes(b"x" * 65536)
one.remove()
two.fetch([(0, len(data))], read, pool := ThreadPoolExecutor(4))
print("fits", (folder / "b").read_bytes() == data)
(folder / "other").write_bytes(b"x" * 6 * 2**20)
again = Window(folder / "b", "b", shard, lambda: leaf_hashes(data, LEAF_SIZE), room)
print("again", again.fetch([(0, len(data))], read, ThreadPoolExecutor(4)))  # a sidecar that was started again
"""


def test_in_a_small_volume_a_restore_ends_before_the_last_mebibyte_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    """In a file system of 20 MiB of its own."""
    (tmp_path / "code.py").write_text(IN_A_SMALL_VOLUME)
    volume = tmp_path / "volume"
    volume.mkdir()
    code = f"{sys.executable} {tmp_path}/code.py {volume} {Path(__file__).parent}"
    line = f"mount -t tmpfs -o size=20m tmpfs {volume} && exec {code}"
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    done = subprocess.run(
        ["unshare", *rights, "--mount", "sh", "-c", line], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    away, full, fits, again = done.stdout.splitlines()
    assert (away, fits, again) == ("away", "fits True", f"again {12 * MIB}")
    assert f"the shared volume at {volume} is too small: it has {20 * MIB} bytes" in full
    assert f"the restore of the-checkpoint needs up to {24 * MIB} here" in full
    assert "raise checkpoint.staging.size" in full


def test_a_full_volume_is_told_to_the_rank_with_its_size_and_the_next_step(tmp_path: Path) -> None:
    volume, run = Volume(tmp_path), None
    volume.work.mkdir()
    restores = Restores(volume, run, Metrics(), threads=1)  # type: ignore[arg-type]

    def write() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RequestError) as refused:
        restores._guard(write)
    assert refused.value.error == "Internal"
    assert str(refused.value).startswith(f"the shared volume at {volume.work} is too small: it has ")
    assert kind_of_refusal(f"Internal: {refused.value}") is Refusal.PASSING


def test_a_range_that_would_take_of_the_reserve_gets_no_page(tmp_path: Path) -> None:
    with (tmp_path / "w").open("w+b") as file:
        with pytest.raises(VolumeFullError, match="too small"):
            Room(tmp_path, "c", reserve=1 << 62).take(file.fileno(), 0, MIB, MIB)
        assert os.fstat(file.fileno()).st_blocks == 0
        room = Room(tmp_path, "c")
        assert room.told(OSError(28, "No space left on device")) == str(room.full())
        assert str(RESERVE_BYTES) in str(room.full())
        assert "Input/output error" in room.told(OSError(5, "Input/output error"))

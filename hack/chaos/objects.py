"""Objects of the store that are changed or deleted behind everybody's back, and a store that answers slowly."""

from __future__ import annotations

import os
import signal
import threading
import time

from botocore.exceptions import ClientError

from hack.chaos.journals import Journals
from hack.chaos.processes import kill_rank_of
from hack.chaos.record import ChaosError, Hit, NotYetError
from hack.chaos.scene import Scene, pick, prove
from hack.cluster_world import BUCKET
from trainer_sidecar.contract.journal import Manifest

FRESH_SECONDS = 6.0
"""A commit this young is still the newest when the rank is dead."""
OLDER = 2
"""Good checkpoints behind the one that is damaged, so that there is something to fall back to."""
FROZEN_SECONDS, AWAKE_SECONDS = 0.9, 0.1
SLOW_SECONDS = 0.4
"""An answer that takes so long shows that the store is throttled; it takes milliseconds otherwise."""


def corrupt_newest(scene: Scene, journals: Journals, draw: int) -> Hit:
    """Change a byte of the newest checkpoint and kill a rank, so that somebody must read it.

    Half of them on the server's disk, where no look at an object's size or checksum shows it; half by a PUT.
    """
    fresh = [(job.name, c) for job in scene.jobs if (c := newest_young(journals, job.name))]
    job, commit = pick(
        fresh, draw, f"commit of the last {FRESH_SECONDS:.0f} s with {OLDER} good ones behind it"
    )
    key = scene.keys(job).shard(commit.checkpoint_id, 0)
    before, pods = _read(scene, key), [pod for pod in scene.pods() if pod.job == job]
    # From here on nothing asks the API server, which may be away: another try would damage another checkpoint.
    at = len(before) // 2
    changed = before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :]
    began = time.time()
    way = _on_disk if draw // 64 % 2 else _by_put
    way(scene, key, at, changed)
    journals.damaged(job, commit.checkpoint_id, began)
    killed = kill_rank_of(pods)
    try:
        found, _ = prove(f"bytes of {key}", lambda: _read(scene, key))
    except NotYetError as error:
        raise ChaosError(f"{key} was changed, and what became of that is unknown: {error}") from error
    if found != changed:
        raise ChaosError(f"{key} does not have the bytes that were written at {at}")
    proof = f"byte {at} of {key} reads {found[at]} instead of {before[at]}; {killed}"
    name = f"{commit.checkpoint_id} of {job} ({way.__name__.strip('_').replace('_', ' ')})"
    return Hit(name, began, time.time(), proof, (job,), commit.checkpoint_id)


def newest_young(journals: Journals, job: str) -> Manifest | None:
    """The newest checkpoint of a job, when it is young and others stand behind it.

    One of them is newer than what was damaged last: a job that finds three bad ones in a row ends, as it should.
    """
    journal = journals.read_on(job)
    good = journal.good
    if len(good) <= OLDER or time.time() - good[-1].time > FRESH_SECONDS:
        return None
    last = max((damage.time for damage in journal.damages), default=0.0)
    return good[-1] if good[-2].time > last else None


def _on_disk(scene: Scene, key: str, at: int, changed: bytes) -> None:
    with scene.object_path(key).open("r+b") as file:
        file.seek(at)
        file.write(changed[at : at + 1])


def _by_put(scene: Scene, key: str, _: int, changed: bytes) -> None:
    scene.s3.put_object(Bucket=BUCKET, Key=scene.full_key(key), Body=changed)


def _read(scene: Scene, key: str) -> bytes:
    data: bytes = scene.s3.get_object(Bucket=BUCKET, Key=scene.full_key(key))["Body"].read()
    return data


def delete_latest(scene: Scene, draw: int) -> Hit:
    """Delete `latest.json` of a job."""
    job = pick(scene.jobs, draw, "job").name
    key = scene.keys(job).latest
    if not _there(scene, key):
        raise NotYetError(f"no {key}")
    began = time.time()
    scene.s3.delete_object(Bucket=BUCKET, Key=scene.full_key(key))
    if _there(scene, key):
        raise NotYetError(f"{key} was written anew at once")
    return Hit(f"latest.json of {job}", began, time.time(), f"{key} is not found", (job,))


def _there(scene: Scene, key: str) -> bool:
    try:
        scene.s3.head_object(Bucket=BUCKET, Key=scene.full_key(key))
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("404", "NoSuchKey", "NotFound"):
            raise
        return False
    return True


class Throttle:
    """The S3 server is frozen and thawed in turns, so that it works a tenth of the time."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def on(self, scene: Scene, _: int) -> Hit:
        """Begin, and measure an answer."""
        pid, usual, began = scene.process("s3"), _answer_seconds(scene), time.time()
        self._stop.clear()
        self._thread = threading.Thread(target=self._turns, args=(pid,), name="throttle", daemon=True)
        self._thread.start()
        slow, seen = prove("slow answer of the store", lambda: _slow(scene))
        jobs = tuple(job.name for job in scene.jobs)
        return Hit("store", began, seen, f"an answer took {slow:.1f} s instead of {usual:.3f} s", jobs)

    def off(self, *_: object) -> None:
        """End, with the server awake; nothing happens when it is not throttled."""
        self._stop.set()
        if self._thread:
            self._thread.join(10)
            self._thread = None

    def _turns(self, pid: int) -> None:
        while not self._stop.is_set():
            os.kill(pid, signal.SIGSTOP)
            self._stop.wait(FROZEN_SECONDS)
            os.kill(pid, signal.SIGCONT)
            self._stop.wait(AWAKE_SECONDS)


def _answer_seconds(scene: Scene) -> float:
    start = time.monotonic()
    scene.s3.list_objects_v2(Bucket=BUCKET, MaxKeys=1)
    return time.monotonic() - start


def _slow(scene: Scene) -> float | None:
    seconds = _answer_seconds(scene)
    return seconds if seconds > SLOW_SECONDS else None

"""A few of the soak's random kill schedules; `make soak` runs a thousand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.s3
@pytest.mark.slow
def test_random_kills_lose_and_fake_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "hack/soak",
        "--schedules",
        "20",
        "--seed",
        "5001",
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("20 schedules in", "wrong restore points: 0", "lost commits: 0", "stuck: 0"):
        assert line in done.stdout, done.stdout
    assert "killed: 0 coordinators" not in done.stdout, "the schedules kill something"


LOSES_COMMITS = """
import trainer_sidecar.sidecar.run as run
from trainer_sidecar.contract.journal import Manifest
def acknowledged_too_early(journal, manifest, ref, *, owner, writer, **_):
    return Manifest(seq=journal.history.next_seq, epoch=manifest.epoch, owner=owner, writer=writer, nonce="x", time=0,
                    checkpoint_id=manifest.checkpoint_id, save_id=manifest.save_id, step=manifest.progress.step,
                    samples=0, manifest=ref, reason=manifest.reason)
run.commit_manifest = acknowledged_too_early
"""
SAVES_OTHER_BYTES = """
import trainer_sidecar.sidecar.part_upload as part_upload
class Store:
    def __init__(self, inner): self.inner = inner
    def create_large(self, key, view, *, parallel, hashes):
        hashes.complete()
        return self.inner.create_large(key, memoryview(bytes(len(view))))
upload = part_upload.upload_shard
import trainer_sidecar.sidecar.saves as saves
saves.upload_shard = lambda maker, store, keys, threads: upload(maker, Store(store), keys, threads)
import trainer_sidecar.sidecar.coordinator as coordinator
coordinator.Expected.difference = lambda *_: ""
"""


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "told"), [(LOSES_COMMITS, "lost commits"), (SAVES_OTHER_BYTES, "wrong restore points")]
)
def test_a_sidecar_that_loses_or_fakes_is_caught(tmp_path: Path, mutation: str, told: str) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from hack.soak.campaign import Campaign
{mutation}
from pathlib import Path
seeds = range(5001, 5009)  # on a busy machine all kills of a schedule may come before its first commit
runs = (Campaign(1, seed, Path({str(tmp_path)!r}), quiet=True).run() for seed in seeds)
sys.exit(next((code for code in runs if code), 0))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(f"{told}: [1-9]", done.stdout), done.stdout + done.stderr
    assert "seed 500" in done.stdout, "the seed of each failure is named"

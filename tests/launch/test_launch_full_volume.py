"""A shared volume that is full, and that being the news: rank and launcher tell it all the same. A file system of its
own, filled to the last page between the start of the ranks and their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_sidecar import launch
from trainer_sidecar.contract.outcome import Outcome

SCRIPT = """
import os
from pathlib import Path
from types import SimpleNamespace
from trainer_sidecar.train.errors import ResumeRefused
from trainer_sidecar.train.outcome import OutcomeFile
folder = Path(os.environ["RTJ_OUTCOME_DIR"])
outcome = OutcomeFile(folder, SimpleNamespace(epoch=1, attempt=1), 0)
if "FILL" in os.environ:
    with open(folder.parents[2] / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
outcome.failed(ResumeRefused(["Internal: the volume is too small \\U0001f600" + "\\U0001f600" * 4000]), 7)
raise SystemExit(1)
"""
PLAN = {
    "contractVersion": 1,
    "runId": "x",
    "attempt": 1,
    "epoch": 1,
    "order": "Run",
    "topology": {"nodes": 1, "ranksPerNode": 1},
    "master": {"address": "127.0.0.1", "port": 0},
}


def in_its_own_volume(root: Path, command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`command` where `<root>/volume` is a tmpfs of 1 MiB; what it leaves in there is copied to `<root>/left`."""
    volume = root / "volume"
    volume.mkdir()
    env = {
        **os.environ,
        "RTJ_VOLUME": str(volume),
        "RTJ_PLAN_FILE": str(root / "plan.json"),
        "RTJ_TERMINATION_LOG": str(root / "termination"),
        "RTJ_STARTUP_TIMEOUT": "1",
        **more,
    }
    (root / "plan.json").write_text(json.dumps(PLAN))
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    line = f"mount -t tmpfs -o size=1m tmpfs {volume} && {command}; code=$?; cp -r {volume} {root}/left; exit $code"
    return subprocess.run(
        ["unshare", *rights, "--mount", "sh", "-c", line], env=env, capture_output=True, text=True, timeout=90
    )


@pytest.mark.torchrun
def test_the_outcome_of_ranks_that_end_in_a_full_volume_is_told_whole(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = in_its_own_volume(tmp_path, f"{sys.executable} {launch.__file__} -- {script}", FILL="1")
    told = tmp_path / "left" / "w" / "outcome" / "1"
    rank = Outcome.model_validate_json((told / "rank-00000.json").read_bytes())
    assert (rank.kind, rank.step, len(rank.message)) == ("ResumeRefused", 7, 4035)
    pod = Outcome.model_validate_json((told / "pod.json").read_bytes())
    assert pod.kind == "ResumeRefused"
    assert pod.message.startswith("Internal: the volume is too small")
    assert "Traceback" not in done.stderr
    assert not (told / "rank-00000.open").exists()


@pytest.mark.torchrun
def test_ranks_that_cannot_be_started_in_a_full_volume_end_the_launcher_with_the_reason(
    tmp_path: Path,
) -> None:
    fill = f"head -c 2000000 /dev/zero > {tmp_path}/volume/filler 2>/dev/null"
    done = in_its_own_volume(tmp_path, f"{fill}; {sys.executable} {launch.__file__} -- train.py")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    outcome = Outcome.model_validate_json((tmp_path / "termination").read_bytes())
    assert outcome.kind == "Failed"
    assert f"is the shared volume at {tmp_path}/volume/w full?" in outcome.message
    assert "No space left" in outcome.message

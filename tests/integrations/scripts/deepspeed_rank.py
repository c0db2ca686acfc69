"""The DeepSpeed script of docs/own-folder.md, as it stands there, under a rank's eye: losses are written down.

`DS_TOTAL`: steps. `DS_KILL`: rank 1 dies at the end of that step, unless it has resumed. `DS_BREAK`: `nothing` (the
script offers no migration), `two`, `loses a shard` (a file goes before the converter sees it). `DS_FOLDER`: where it
works.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import deepspeed

from trainer_sidecar.train import FolderSession, ResumeRefused

ROOT = Path(__file__).resolve().parents[3]
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else two minutes of compiling
out, breaks = Path(os.environ["TINY_OUT"]), os.environ.get("DS_BREAK", "")
rank = int(os.environ["RANK"])
found: dict[str, Any] = {"losses": {}, "stage": None}
restore, step_end = FolderSession.restore_folder, FolderSession.step_end


def restored(self: FolderSession, folder: Path, **options: Any) -> Any:
    """As the page's call, unless something is to go wrong."""
    ((name, convert),) = options["migrations"].items()

    def loses_a_shard(source: Path, target: Path) -> None:
        next(source.glob("*/*_rank_1_*optim_states.pt")).unlink()
        convert(source, target)

    offered = {
        "nothing": {},
        "two": {name: convert, "other": convert},
        "loses a shard": {name: loses_a_shard},
    }
    try:
        point = restore(self, folder, migrations=offered.get(breaks, options["migrations"]))
    except ResumeRefused as error:
        found["refused"] = str(error)
        raise
    if point is not None:
        found["path"], found["migration"] = str(point.path), point.migration
        found["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return point


def stepped(self: FolderSession, step: int, *, loss: float) -> bool:
    found["losses"][step] = loss
    if str(step) == os.environ.get("DS_KILL") and self.restore_point is None and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step_end(self, step, loss=loss)


FolderSession.restore_folder, FolderSession.step_end = restored, stepped  # type: ignore[method-assign]
page = (ROOT / "docs" / "own-folder.md").read_text()
(sample,) = re.findall(r"```python\n(# train_deepspeed\.py\n.*?)```", page, re.DOTALL)
sample = sample.replace("TOTAL = 8\n", f"TOTAL = {os.environ['DS_TOTAL']}\n")
work = Path(os.environ["DS_FOLDER"])
work.mkdir(parents=True, exist_ok=True)
os.chdir(work)
scope: dict[str, Any] = {"__name__": "sample"}
try:
    exec(compile(sample, "own-folder.md", "exec"), scope)
finally:
    if (session := scope.get("session")) is not None:
        found["report"] = json.loads(session.resume.to_json()) if session.resume else None
    if (engine := scope.get("engine")) is not None:
        found["stage"] = engine.zero_optimization_stage()
        found["rate"], found["saved"] = engine.get_lr(), [str(p) for p in Path("saved").glob("*")]
    epoch = json.loads(Path(os.environ["RTJ_PLAN"]).read_text())["epoch"]
    (out / f"deepspeed-e{epoch}-r{rank}.json").write_text(json.dumps(found))

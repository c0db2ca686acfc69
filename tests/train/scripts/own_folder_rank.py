"""A rank of a framework that writes its checkpoint into folders: those of its own, and one that all ranks have.

`FOLDER_MODE`: save (two saves of two kinds, a refused one, and a third in which rank 1 is killed) or load.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer_sidecar.train import FolderRefused, FolderSession, ResumeRefused, folder_sharing, folder_staging

out = Path(os.environ["TINY_OUT"])
found: dict[str, Any] = {}


def write(folder: Path, rank: int, step: int) -> None:
    """Every rank its own shard, as ZeRO does; rank 0 what all share."""
    shards = folder / f"global_step{step}"
    shards.mkdir(parents=True, exist_ok=True)
    (shards / f"zero_pp_rank_{rank}_optim_states.pt").write_bytes(
        bytes([rank, step]) * (300_000 * (rank + 1))
    )
    if rank == 0:
        (shards / "empty").touch()
        (shards / "mp_rank_00_model_states.pt").write_bytes(bytes(range(256)) * 40_000)  # more than one piece
        (folder / "latest").write_text(f"global_step{step}")


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except (FolderRefused, ResumeRefused, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def save(session: FolderSession) -> None:
    rank = session.rank
    assert session.restore_folder(out / "restored") is None
    one = out / "one"
    write(one, rank, 1)
    found["due"] = [session.step_end(1, loss=2.0)]
    session.commit_folder(one, step=1, ignore=["*/nothing"])
    for path in one.rglob("*"):  # on return, all of it is copied: what is written now is not kept
        if path.is_file():
            path.write_bytes(b"later")
    (out / f"own-{rank}").mkdir()
    (out / f"own-{rank}" / "state").write_bytes(b"own" * rank)
    found["due"].append(session.step_end(2, loss=1.0))
    session.commit_folder(out / f"own-{rank}", step=2, wait=True)
    found["not one"] = refusal(session.commit_folder, out / f"own-{rank}", step=3, shared=True)
    if rank == 1:
        (out / "own-1" / "way out").symlink_to("/etc/hostname")
    found["link"] = refusal(session.commit_folder, out / f"own-{rank}", step=3)
    found["restored"] = refusal(session.commit_folder, out / "restored" / "deeper", step=3)
    found["older"] = refusal(session.commit_folder, one, step=1)
    (out / f"found-{rank}.json").write_text(json.dumps(found))
    if rank == 1:
        folder_staging.check_same = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    session.commit_folder(one, step=3)


def long_work(session: FolderSession) -> str:
    """Rank 1 works until the ranks have met three times; rank 0 has nothing to do. The second work fails."""
    folder_sharing._BEAT_SECONDS = 0.05
    agreement, meetings = session._agreement, []
    total = agreement.total

    def counted(numbers: list[float]) -> Any:
        meetings.append(numbers)
        return total(numbers)

    agreement.total = counted  # type: ignore[method-assign]

    def work() -> tuple[str, str]:
        deadline = time.monotonic() + 60
        while session.rank == 1 and len(meetings) < 3:
            assert time.monotonic() < deadline, "no meeting while a rank works"
            time.sleep(0.01)
        return "", str(session.rank)

    def fails() -> tuple[str, str]:
        if session.rank == 1:
            raise FolderRefused("cannot be converted")
        return "", ""

    folder_sharing.meet_after(agreement, work)
    said = refusal(folder_sharing.meet_after, agreement, fails)
    del agreement.total
    return said


def load(session: FolderSession) -> None:
    rank = session.rank
    if session.restore_point.step == 2:
        found["both"] = refusal(session.restore_folder, out / "both")
    folder = out / "again" if session.restore_point.step == 1 else out / f"again-{rank}"
    restored = session.restore_folder(folder)
    assert restored is not None
    found["step"], found["samples"] = restored.step, restored.samples
    found["folders"] = {str(leader): str(path) for leader, path in restored.folders.items()}
    found["report"] = json.loads(session.resume.to_json())
    if restored.step == 1:
        found["work"] = long_work(session)
    session.step_end(restored.step + 1, loss=1.0)
    (out / f"loaded-{restored.step}-{rank}.json").write_text(json.dumps(found))


with FolderSession.from_env(device="cpu") as session:
    {"save": save, "load": load}[os.environ["FOLDER_MODE"]](session)
    dist.barrier()

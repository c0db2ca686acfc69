"""That a run has ended is known to its script alone; `finished.json` keeps it: nothing need be started to find out.

A hint like `latest.json`, never the truth: it counts only while the checkpoint that it names is what a resume would
take and the same command, with the same files, is run again. More steps are another command.
"""

import hashlib
import json
import os
from pathlib import Path

from pydantic import ValidationError

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, Store
from trainer_sidecar.store.history import History

_MOST_BYTES = 16 << 20


class Finish(Document):
    """The end of a run: its last checkpoint, by the sequence of its commit, and the command that made it."""

    sequence: int
    checkpoint_id: str
    step: int
    command: str
    """As `command_digest` says."""


def command_digest(script: list[str]) -> str:
    """SHA-256 of the arguments and of the files that they name (`--config=a.yaml` too). 64 hex digits."""
    said = hashlib.sha256(json.dumps(script).encode())
    for argument in script:
        for name in (argument, argument.partition("=")[2]):
            path = Path(name) if name else None
            if path is not None and len(name) < 4096 and path.is_file():
                said.update(f"\n{name}\n".encode(errors="surrogateescape"))
                said.update(_content(path))
    return said.hexdigest()


def _content(path: Path) -> bytes:
    """The file's bytes; of a large one (data) its size and time. Unreadable ones have none."""
    try:
        facts = path.stat()
        if facts.st_size <= _MOST_BYTES:
            return path.read_bytes()
    except OSError:
        return b""
    return os.fsencode(f"{facts.st_size} {facts.st_mtime_ns}")


def record_finish(store: Store, keys: RunKeys, point: RestorePoint, script: list[str]) -> None:
    """Say that the run has ended at `point`. Raises StoreError."""
    finish = Finish(
        sequence=point.sequence,
        checkpoint_id=point.checkpoint_id,
        step=point.step,
        command=command_digest(script),
    )
    store.put(keys.finished, finish.to_bytes())


def why_complete(store: Store, keys: RunKeys, history: History, script: list[str]) -> str:
    """A sentence where this very command has ended the run before; empty when it has not, or that cannot be known.

    Raises StoreError when the store is away.
    """
    point = history.newest_restorable
    if point is None:
        return ""
    try:
        finish = Finish.model_validate_json(store.get(keys.finished))
    except (NotFoundError, ValidationError):
        return ""
    same = (finish.sequence, finish.checkpoint_id) == (point.sequence, point.checkpoint_id)
    if not same or finish.command != command_digest(script):
        return ""
    return (
        f"run {keys.run_id} is complete: the same command finished at step {point.step} (checkpoint "
        f"{point.checkpoint_id}). For more steps change its arguments or files, or start it anyway with --again"
    )

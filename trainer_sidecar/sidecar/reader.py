"""Reads all bytes of a checkpoint and proves them: the pod of a drill that restores nothing. It writes to no store.

Its verdict is its termination message; the operator reads the accused object again before it believes one, and writes
the journal. A store that is away is no verdict: the process ends with 69 and Kubernetes starts another.
"""

import logging
import os
import sys
import time
from pathlib import Path

from trainer_sidecar.contract import volume as env
from trainer_sidecar.contract.drill import ENV_CHECKPOINT, MAX_RESULT_BYTES, TERMINATION_LOG, ReadResult
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.restore_fault import RestoreFault
from trainer_sidecar.sidecar import logs
from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store
from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError

log = logging.getLogger(__name__)
EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69
_SHOWN = 256


def main(message: Path = Path(TERMINATION_LOG)) -> int:
    """0 with a `ReadResult` in `message`, good or bad; 64 for bad settings, 69 when the store cannot be read, each with
    a sentence there."""
    logs.setup(os.environ.get(env.ENV_POD_NAME, "reader"))
    try:
        names = (env.ENV_NAMESPACE, env.ENV_RUN_ID, env.ENV_STORE_URL, ENV_CHECKPOINT)
        namespace, run_id, url, checkpoint = (os.environ[name] for name in names)
        store = open_store(url)
        result = read(store, RunKeys(namespace, run_id), checkpoint)
    except (KeyError, ValueError) as exc:
        return _say(message, f"the reader's settings are wrong: {exc}", EXIT_USAGE)
    except (StoreError, FormatTooNewError) as exc:
        return _say(message, f"{type(exc).__name__}: {exc}", EXIT_UNAVAILABLE)
    return _say(message, result.to_json(), 0)


def read(store: Store, keys: RunKeys, checkpoint_id: str) -> ReadResult:
    """Read and prove everything that the checkpoint consists of. Raises KeyError when it was never committed,
    StoreError, FormatTooNewError."""
    point = Journal(store, keys).read().restore_point_of(checkpoint_id)
    started, done = time.monotonic(), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count

    fault = None
    try:
        verify_bytes(store, keys, point, progress=progress)
    except BadCheckpointError as exc:
        texts = (f"{exc.file} should be {exc.expected}, found {exc.found}", exc.file, exc.expected, exc.found)
        reason, file, expected, found = (_bounded(text, _SHOWN) for text in texts)
        fault = RestoreFault(
            checkpoint_id=checkpoint_id,
            fault=exc.fault,
            reason=reason,
            file=file,
            expected=expected,
            found=found,
        )
    seconds = round(time.monotonic() - started, 3)
    log.info("checkpoint read", extra={"checkpoint": checkpoint_id, "bytes": done, "good": fault is None})
    return ReadResult(checkpoint_id=checkpoint_id, bytes=done, seconds=seconds, fault=fault)


def _say(message: Path, text: str, code: int) -> int:
    if code:
        log.error("the reader ends", extra={"reason": text})
    message.write_text(_bounded(text, MAX_RESULT_BYTES))
    return code


def _bounded(text: str, most: int) -> str:
    """The beginning of the text that takes at most `most` bytes, and twice that inside of JSON."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown.encode(errors="replace")[:most].decode(errors="ignore")


if __name__ == "__main__":
    sys.exit(main())

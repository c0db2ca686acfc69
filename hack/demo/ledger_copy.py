"""Brings ledgers from a pod to the store while they grow, and puts them together again on the other side.

On a cluster of one's own no folder is shared with the ranks. A container beside them runs this file (from a ConfigMap,
so it may use nothing of `hack`) and copies whole lines that are new, several times a second, and once more at SIGTERM.
Pieces carry their place in the file, so that copying them again after a restart of the container changes nothing.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.open import open_store

PREFIX = "demo-ledgers/"
EVERY_SECONDS = 0.3
LAST_SECONDS = 20.0
"""How long the last copy is tried. Less than the grace period of any job's pod."""
_READERS = 16


class Copier:
    """Copies what has been added to the files of a folder since the last time."""

    def __init__(self, folder: Path, store: Store, pod: str) -> None:
        self._folder, self._store, self._pod = folder, store, pod
        self._copied: dict[str, int] = {}
        """Bytes by file name that are in the store."""

    def copy(self) -> int:
        """Copy whole lines that are new; how many files had some. Raises StoreError, and then nothing counts as
        copied."""
        new: list[dict[str, str | int]] = []
        reached: dict[str, int] = {}
        for path in sorted(self._folder.glob("*.jsonl")):
            start = self._copied.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(start)
                lines = file.read()
            lines = lines[: lines.rfind(b"\n") + 1]  # a rank may be in the middle of one
            if lines:
                new.append({"name": path.name, "offset": start, "text": lines.decode()})
                reached[path.name] = start + len(lines)
        if new:
            piece = f"{PREFIX}{self._pod}/{time.time_ns():020d}.json"
            self._store.put(piece, json.dumps(new).encode())
            self._copied.update(reached)
        return len(new)

    def follow(self, stop: threading.Event) -> bool:
        """Copy until `stop`, and then what is left; whether that could be done."""
        while not stop.wait(EVERY_SECONDS):
            self._tried()
        deadline = time.monotonic() + LAST_SECONDS
        while not (done := self._tried()) and time.monotonic() < deadline:
            time.sleep(EVERY_SECONDS)
        return done

    def _tried(self) -> bool:
        try:
            self.copy()
        except StoreError as error:
            print(f"ledger: {error.reason}: {error}", file=sys.stderr, flush=True)
            return False
        return True


def fetch(store: Store, folder: Path) -> None:
    """Write the ledgers that pods have copied into `folder`. Raises StoreError."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = [found.key for found in store.list(PREFIX)]
    with ThreadPoolExecutor(_READERS) as readers:
        pieces = [entry for data in readers.map(store.get, keys) for entry in json.loads(data)]
    for entry in pieces:
        path = folder / entry["name"]
        path.touch()
        with path.open("r+b") as file:
            file.seek(entry["offset"])
            file.write(entry["text"].encode())


def main(argv: list[str]) -> int:
    """`ledger_copy.py FOLDER STORE POD`: until SIGTERM; 1 when the last lines could not be copied."""
    folder, url, pod = argv
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    store = open_store(url)
    try:
        return 0 if Copier(Path(folder), store, pod).follow(stop) else 1
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

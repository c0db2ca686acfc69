"""Probing each store once per process: the answer does not change, and a probe costs some ten requests."""

import threading

from trainer_sidecar.store.base import Store
from trainer_sidecar.store.probe import ProbeReport, probe_store


class Probed:
    """Thread-safe. Remembers what was found by the store's object; trouble on the way is not remembered."""

    def __init__(self) -> None:
        self._reports: dict[int, tuple[Store, ProbeReport]] = {}
        self._lock = threading.Lock()

    def require(self, store: Store) -> None:
        """Raises UnsupportedStoreError that names the store and each failed check; StoreError when it is away."""
        with self._lock:
            known = self._reports.get(id(store))
        if known is None:
            known = (store, probe_store(store))
            with self._lock:
                self._reports[id(store)] = known
        known[1].require()

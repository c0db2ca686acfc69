"""Probing each store once per process: a probe costs some twenty requests, and its answer does not change by itself."""

import threading
import time
import weakref

from trainer_sidecar.store.base import Store
from trainer_sidecar.store.probe import ProbeReport, probe_store

REFUSED_SECONDS = 300.0
"""A store that was refused is looked at again after so long: its settings may have been corrected."""


class Probed:
    """Thread-safe. Trouble on the way (StoreError) is not remembered."""

    def __init__(self) -> None:
        self._reports: weakref.WeakKeyDictionary[Store, tuple[ProbeReport, float]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def require(self, store: Store) -> None:
        """Raises UnsupportedStoreError that names the store and each failed check; StoreError when it is away."""
        with self._lock:
            report, seen = self._reports.get(store, (None, 0.0))
        if report is None or (not report.passed and time.monotonic() - seen > REFUSED_SECONDS):
            report = probe_store(store)
            with self._lock:
                self._reports[store] = report, time.monotonic()
        report.require()

"""Reads a run's journal from its store, from slot 1 to the first empty one, with nothing but GETs."""

from collections.abc import Iterator
from contextlib import suppress

from trainer_sidecar.contract.journal import Entry, UnparsableEntryError, parse_entry
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, Store


def read_entries(store: Store, keys: RunKeys) -> list[Entry]:
    """All entries in order; void slots are left out. Raises StoreError, UnknownEntryError."""
    return list(_entries(store, keys))


def _entries(store: Store, keys: RunKeys) -> Iterator[Entry]:
    seq = 1
    while True:
        try:
            data = store.get(keys.journal(seq))
        except NotFoundError:
            return
        with suppress(UnparsableEntryError):  # R17: a void slot claims nothing, later ones still count
            yield parse_entry(data, seq)
        seq += 1

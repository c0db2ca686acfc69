"""A symbolic link in a `file://` store leads out of it: nothing behind it is listed, and nothing is deleted there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_world import KEYS, fence, journal, save

from trainer_sidecar.store.base import UnsupportedStoreError
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.retention import delete_checkpoints, sweep

ORPHAN = "000000000099-0000000001-deadbeef"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Somebody else's folder."""
    folder = tmp_path / "outside"
    (folder / "below").mkdir(parents=True)
    for name in ("precious", "below/precious", "manifest.json", ".tmp-precious"):
        (folder / name).write_text("not the store's")
    return folder


def contents(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_a_sweep_deletes_nothing_behind_a_link_that_looks_like_an_orphan(
    tmp_path: Path, outside: Path
) -> None:
    store = FileStore(tmp_path / "store")
    first = fence(store)
    kept = save(store, first, 1)
    second = fence(store, "nonce-2")
    link = store.root / KEYS.checkpoints_prefix / ORPHAN
    link.symlink_to(outside)
    os.mkfifo(link.with_name("pipe"))
    link.with_name("loop").symlink_to("loop")
    before = contents(outside)

    by = journal(store)
    by.read()
    assert sweep(by, second.epoch).doomed == {}
    assert contents(outside) == before
    assert delete_checkpoints(store, KEYS, [ORPHAN]) == 0, "asked for by name it is refused as well"
    assert contents(outside) == before
    assert {o.key for o in store.list(KEYS.checkpoints_prefix)} >= {KEYS.manifest(kept.checkpoint_id)}


def test_listing_and_deleting_through_a_link_is_refused_by_name(tmp_path: Path, outside: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.create("run/real", b"x")
    (store.root / "run" / "link").symlink_to(outside)
    before = contents(outside)
    for act in (
        lambda: list(store.list("run/link/")),
        lambda: list(store.list("run/link/below/")),
        lambda: store.delete(["run/link/precious"]),
        lambda: store.discard_unfinished("run/link/", lambda _: True),
    ):
        with pytest.raises(UnsupportedStoreError, match="run/link is a symbolic link"):
            act()
    assert [o.key for o in store.list("")] == ["run/real"]
    assert contents(outside) == before
    store.delete(["run/link"])  # the link alone
    assert contents(outside) == before


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "name").symlink_to(tmp_path / "disk")
    store = FileStore(tmp_path / "name")
    store.create("run/object", b"x")
    assert [o.key for o in store.list("run/")] == ["run/object"]
    store.delete(["run/object"])
    assert not list(store.list(""))

"""The format's documentation cannot drift from the models, and old and new versions are told apart."""

import importlib.util
import re
from pathlib import Path

import pytest
import store_world as world
from store_world import KEYS, fence, journal, save

from trainer_sidecar.contract.journal import KINDS, UnknownEntryError, parse_entry
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.verify import FormatTooNewError, read_manifest

ROOT = Path(__file__).resolve().parents[2]


def test_the_schemas_in_the_documentation_are_those_of_the_models() -> None:
    spec = importlib.util.spec_from_file_location("format_schemas", ROOT / "hack" / "format_schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.differing() == [], "run hack/format_schemas.py"


def test_the_format_page_names_every_schema_and_every_kind_of_entry() -> None:
    page = (ROOT / "docs" / "format.md").read_text()
    for schema in (ROOT / "docs" / "schemas").glob("*.json"):
        assert f"schemas/{schema.name}" in page
    assert all(f"`{kind}`" in page for kind in KINDS)


def test_every_test_that_the_protocol_page_names_exists() -> None:
    page = (ROOT / "docs" / "design" / "0001-commit-protocol.md").read_text()
    named = re.findall(r"`(test_[a-z0-9_]+)`", page)
    assert len(named) > 10
    files = list((ROOT / "tests").rglob("test_*.py"))
    code = "\n".join(p.read_text() for p in files) + "".join(f"def {p.stem}(" for p in files)
    assert [name for name in named if f"def {name}(" not in code] == []


def test_an_entry_of_a_newer_schema_is_refused_and_unknown_fields_of_this_one_are_read() -> None:
    store = MemoryStore()
    fenced = fence(store)
    data = store.get(KEYS.journal(1)).replace(b'"kind"', b'"addedLater":1,"kind"')
    assert parse_entry(data, 1) == fenced.entry
    with pytest.raises(UnknownEntryError, match="upgrade"):
        parse_entry(data.replace(b'"schema":1', b'"schema":2'), 1)


def test_a_manifest_of_a_newer_schema_is_refused_and_not_quarantined() -> None:
    store = MemoryStore()
    fenced = fence(store)
    manifest = save(store, fenced, 1)
    key = KEYS.manifest(manifest.checkpoint_id)
    newer = store.get(key).replace(b'"schema":2', b'"schema":3', 1)
    store.put(key, newer)
    import hashlib

    digest = manifest.manifest.model_copy(
        update={"sha256": hashlib.sha256(newer).hexdigest(), "size": len(newer)}
    )
    with pytest.raises(FormatTooNewError, match="upgrade"):
        read_manifest(store, KEYS, world.point(manifest).model_copy(update={"manifest": digest}))
    assert not journal(store).read().quarantined

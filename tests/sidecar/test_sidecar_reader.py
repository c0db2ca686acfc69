"""The reader of a drill: every byte is read, what is wrong is named, and a store that is away is no verdict."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer_sidecar.contract.drill import MAX_RESULT_BYTES, ReadResult
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.sidecar import reader
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.verify import BadCheckpointError

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import store_world as world


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reader's word goes; its settings name a run with one commit of two shards."""
    store = FileStore(tmp_path / "store")
    commit = world.save(store, world.fence(store), 1)
    for name, value in (
        ("RTJ_STORE_URL", f"file://{tmp_path}/store"),
        ("RTJ_NAMESPACE", world.KEYS.namespace),
        ("RTJ_RUN_ID", world.KEYS.run_id),
        ("RTJ_CHECKPOINT", commit.checkpoint_id),
    ):
        monkeypatch.setenv(name, value)
    path = tmp_path / "message"
    path.write_text(str(tmp_path / "store" / world.KEYS.shard(commit.checkpoint_id, 1)))
    return path


def test_a_good_checkpoint_is_read_to_its_last_byte(message: Path) -> None:
    assert reader.main(message) == 0
    result = ReadResult.model_validate_json(message.read_text())
    assert (result.bytes, result.fault) == (32, None)


def test_a_flipped_byte_is_named_with_its_file_and_leaf(message: Path) -> None:
    shard = Path(message.read_text())
    shard.chmod(0o644)
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    assert reader.main(message) == 0, "a verdict, which no second pod would change"
    fault = ReadResult.model_validate_json(message.read_text()).fault
    assert fault is not None
    assert (fault.fault, fault.file) == ("bytes", "rank-00001.distcp")
    assert "leaf 0" in fault.found
    assert len(message.read_bytes()) < MAX_RESULT_BYTES


def test_a_missing_object_is_a_verdict_too(message: Path) -> None:
    Path(message.read_text()).unlink()
    assert reader.main(message) == 0
    fault = ReadResult.model_validate_json(message.read_text()).fault
    assert fault is not None
    assert fault.fault == "missing"


@pytest.mark.parametrize(
    "long", ["x" * 5000, '"' * 5000, "\x1b" * 5000, "\u00fc\U0001f980" * 3000, "\ud800" * 5000]
)
def test_a_fault_with_long_texts_is_a_whole_result_all_the_same(
    message: Path, monkeypatch: pytest.MonkeyPatch, long: str
) -> None:
    def damaged(_store: object, _keys: object, point: RestorePoint, **_: object) -> None:
        raise BadCheckpointError(point.checkpoint_id, "bytes", long, long, long)

    monkeypatch.setattr(reader, "verify_bytes", damaged)
    assert reader.main(message) == 0
    assert len(message.read_bytes()) <= MAX_RESULT_BYTES
    fault = ReadResult.model_validate_json(message.read_text()).fault
    assert fault is not None
    assert fault.fault == "bytes"


def test_a_store_that_is_away_and_wrong_settings_are_none(
    message: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTJ_CHECKPOINT", "000000000009-0000000001-00000000")
    assert reader.main(message) == reader.EXIT_USAGE
    assert "000000000009" in message.read_text()
    Path(message.parent / "file").write_text("")
    monkeypatch.setenv("RTJ_STORE_URL", f"file://{message.parent}/file/store")
    assert reader.main(message) == reader.EXIT_UNAVAILABLE
    monkeypatch.delenv("RTJ_STORE_URL")
    assert reader.main(message) == reader.EXIT_USAGE
    assert "RTJ_STORE_URL" in message.read_text()

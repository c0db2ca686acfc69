"""However a tensor was sharded, its export holds each element in its place; found by random shapes and cuts."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from trainer_sidecar import cli
from trainer_sidecar.commands.export import chosen, without
from trainer_sidecar.contract.checkpoint import HashedBytes
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.export import dcp_folder, safetensors_file
from trainer_sidecar.export.source import Slice, Source, Stored, blocks
from trainer_sidecar.store.deep import HashedFile
from trainer_sidecar.store.memory import MemoryStore

FILE = HashedFile("shard", "leaves", HashedBytes(size=0, root="", leaves=ObjectRef(size=0, sha256="")))


class Bytes:
    """A source whose one file is in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, file: HashedFile, offset: int, length: int) -> memoryview:
        return memoryview(self.data)[offset : offset + length]


@st.composite
def sharded(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A tensor of 0 to 4 dimensions, and blocks that make it up: each dimension is cut at random places."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = draw(st.sampled_from([np.uint8, np.float16, np.int64]))
    tensor = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    edges = []
    for size in shape:
        cuts = draw(st.sets(st.integers(0, size), max_size=2))
        edges.append(sorted({0, size, *cuts}))
    places: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for marks in edges:
        parts = list(itertools.pairwise(marks)) or [(0, 0)]
        places = [((*at, a), (*size, b - a)) for at, size in places for a, b in parts]
    return tensor, draw(st.permutations(places))


def stored(tensor: np.ndarray[Any, Any], places: Any, data: bytearray, name: str) -> Stored:
    """The tensor with its blocks' bytes appended to the file."""
    slices = []
    for start, size in places:
        block = tensor[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        slices.append(Slice(FILE, len(data), block.nbytes, start, size))
        data += block.tobytes()
    return Stored(name, str(tensor.dtype), tensor.shape, tuple(slices))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(sharded(), min_size=1, max_size=3), st.sampled_from([1, 7, 64]))
def test_whatever_the_cuts_the_file_holds_the_tensors(cases: list[Any], limit: int) -> None:
    data = bytearray(b"in front")
    tensors = {f"t{i}": stored(tensor, places, data, f"t{i}") for i, (tensor, places) in enumerate(cases)}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "BLOCK_BYTES", limit)
        (shard,) = safetensors_file.plan(tensors, "tensors", 10**9)
        counted: list[int] = []
        path = safetensors_file.write(
            Bytes(bytes(data)),  # type: ignore[arg-type]
            shard,
            Path(folder),
            {"step": "7"},
            parallel=2,
            progress=counted.append,
        )
        found = load_file(path)
    for i, (tensor, _) in enumerate(cases):
        assert found[f"t{i}"].dtype == tensor.dtype
        assert np.array_equal(found[f"t{i}"], tensor)
    assert sum(counted) == sum(t.bytes for t in tensors.values())


def test_a_slice_is_cut_into_runs_that_hold_the_limit_and_nothing_is_left_out() -> None:
    piece = Slice(FILE, 100, 4 * 6 * 10 * 4, (2, 0, 5), (4, 6, 10))
    runs = list(blocks(piece, 4, 130))
    assert max(b.length for b in runs) <= 130
    assert [b.offset for b in runs] == [100 + sum(b.length for b in runs[:i]) for i in range(len(runs))]
    assert sum(b.length for b in runs) == piece.length
    assert runs[0].start == (2, 0, 5)
    assert runs[-1].start == (5, 3, 5)


def test_files_hold_the_limit_and_the_index_names_all_of_them() -> None:
    data = bytearray()
    tensor = np.zeros((10, 10), np.float16)
    tensors = {n: stored(tensor, [((0, 0), (10, 10))], data, n) for n in "abcde"}
    shards = safetensors_file.plan(tensors, "model", 450)
    assert [list(s.tensors) for s in shards] == [["a", "b"], ["c", "d"], ["e"]]
    assert shards[0].file == "model-00001-of-00003.safetensors"
    index = safetensors_file.index_of(shards)
    assert index["metadata"]["total_size"] == 1000
    assert json.dumps(index["weight_map"])
    assert index["weight_map"]["e"] == "model-00003-of-00003.safetensors"


def test_a_prefix_that_would_give_two_tensors_one_name_is_refused() -> None:
    tensors = [Stored(f"model/{name}", "float32", (0,), ()) for name in ("module.a", "a", "module.b")]
    manifest: Any = SimpleNamespace(checkpoint_id="c", training_state=SimpleNamespace(trainable=[]))
    with pytest.raises(
        ValueError, match=r"--strip module\.: module\.a would have the name of another tensor"
    ):
        chosen(tensors, manifest, everything=False, trainable=False, strip="module.")
    assert list(chosen(tensors[1:], manifest, everything=False, trainable=False, strip="module.")) == [
        "a",
        "b",
    ]


def test_a_document_is_read_once_and_is_the_one_that_was_proven() -> None:
    """A second read of it could be another one: the bytes that are used are those that were compared."""

    class Once(MemoryStore):
        reads = 0

        def get(self, key: str) -> bytes:
            self.reads += 1
            data = super().get(key)
            return data if self.reads == 1 else data.upper()

    store = Once()
    store.create("k", b"index")
    ref = ObjectRef(size=5, sha256=hashlib.sha256(b"index").hexdigest())
    point = RestorePoint(checkpoint_id="c", sequence=1, step=1, manifest=ref)
    assert Source(store, RunKeys("ns", "run"), point)._proven("k", ref) == b"index"


def test_a_dtype_that_the_format_lacks_is_refused_by_name_with_what_to_do() -> None:
    odd = {name: Stored(f"model/{name}", "complex64", (1,), ()) for name in ("phase", "b")}
    with pytest.raises(ValueError, match=r"phase has dtype complex64.*\(and 1 more\)") as refused:
        safetensors_file.plan(odd, "model", 10)
    assert "--exclude 'phase'" in str(refused.value)
    assert "--format dcp" in str(refused.value)


def test_a_dcp_folder_has_the_dtypes_that_safetensors_lacks(tmp_path: Path) -> None:
    data, whole = bytearray(b"in front"), np.arange(12, dtype=np.complex128).reshape(3, 4) * (1 - 2j)
    arrays = {
        "byte": np.array([7], np.uint8),  # what follows does not lie where a complex number may begin
        "whole": whole,
        "scalar": np.array(3 + 4j, np.complex64),
        "empty": np.zeros((0, 4), np.complex128),
    }
    places = {
        "byte": [((0,), (1,))],
        "whole": [((0, 2), (3, 2)), ((0, 0), (3, 2))],
        "scalar": [((), ())],
        "empty": [],
    }
    tensors = {name: stored(array, places[name], data, name) for name, array in arrays.items()}
    at = len(data)
    data += bytes([0x38, 0xB8])
    tensors["float8"] = Stored("float8", "float8_e4m3fnuz", (2,), (Slice(FILE, at, 2, (0,), (2,)),))
    (shard,) = safetensors_file.plan(tensors, "tensors", 10**9, raw=True)
    source: Any = Bytes(bytes(data))
    path = safetensors_file.write(source, shard, tmp_path, {}, parallel=2, progress=lambda _: None)
    dcp_folder.write([path], tensors, tmp_path / "out")
    found = {
        name: torch.zeros(array.shape, dtype=torch.from_numpy(array).dtype) for name, array in arrays.items()
    }
    found["float8"] = torch.zeros(2, dtype=torch.float8_e4m3fnuz)
    dcp.load(found, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    for name, array in arrays.items():
        assert torch.equal(found[name], torch.from_numpy(array)), name
    assert bytes(found["float8"].view(torch.uint8).numpy()) == data[at:]


def test_tensors_are_left_out_by_pattern_and_a_pattern_that_meets_none_is_told() -> None:
    tensors = {name: Stored(name, "float32", (), ()) for name in ("a.freqs", "b.freqs", "a.w")}
    assert list(without(tensors, ["*.freqs"])) == ["a.w"]
    assert list(without(tensors, ["b*", "a.w"])) == ["a.freqs"]
    assert without(tensors, []) == tensors
    with pytest.raises(ValueError, match=r"--exclude freqs: no tensor has such a name; there is a\.freqs"):
        without(tensors, ["freqs"])
    with pytest.raises(ValueError, match=r"--exclude \* leaves no tensor"):
        without(tensors, ["*"])


def test_a_prefix_cannot_be_taken_off_where_all_names_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--store", f"file://{tmp_path}/ckpt", "--run-id", "x", "--to", str(tmp_path / "to")]
    assert cli.main(["export", "--all", "--strip", "module.", *where]) == 2
    assert "--strip module. and --all exclude each other" in capsys.readouterr().err

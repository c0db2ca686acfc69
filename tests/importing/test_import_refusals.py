"""What is no whole model, or would run code, is refused by file or tensor; nothing is written then."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from torch.distributed.checkpoint import metadata

from trainer_sidecar import cli
from trainer_sidecar.importing.read import read
from trainer_sidecar.importing.run import mapped
from trainer_sidecar.importing.source import UnfitSourceError
from trainer_sidecar.store.base import AccessDeniedError

INDEX = "model.safetensors.index.json"


def file(path: Path, header: dict[str, Any], body: bytes) -> None:
    """A safetensors file as somebody else might write it."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def entry(
    dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def sharded(folder: Path) -> None:
    """Two files of one tensor each, and their index."""
    save_file({"a": np.zeros(3, np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones(2, np.float16)}, folder / "model-00002-of-00002.safetensors")
    where = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def changed_map(folder: Path, **changes: str) -> None:
    sharded(folder)
    known = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {**known, **changes}}))


def raw(folder: Path, header: bytes) -> None:
    """A header that `json` would not write."""
    single(folder).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def changed_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """A folder of torch.distributed.checkpoint with one tensor, its index changed by hand."""
    dcp.save({"a": torch.zeros(4)}, checkpoint_id=folder, no_dist=True)
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def chunk(index: Any) -> Any:
    return index.state_dict_metadata["a"].chunks[0]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def attack(folder: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(folder / "ran"),)

    (folder / ".metadata").write_bytes(pickle.dumps(Runs()))


def named(module: str, name: str, folder: Path) -> None:
    """An index that calls `module.name` with a folder's name, as a pickle may name it."""
    call = pickle.dumps(str(folder / "ran"), 4)[2:-1]  # without the protocol's two bytes and the STOP
    text = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    (folder / ".metadata").write_bytes(b"\x80\x04" + text + b"\x93" + call + b"\x85R.")


class Fetches:
    """Pickled as a call of getattr, as Python 3.11.2 writes the members of enumerations."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (torch.Size, "mro")


def single(folder: Path) -> Path:
    return folder / "model.safetensors"


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda f: None, r"nothing to import: no model\.safetensors, .*it is empty"),
    "pickle": (lambda f: (f / "pytorch_model.bin").touch(), r"pytorch_model\.bin is a pickle"),
    "adapters": (lambda f: (f / "adapter_model.safetensors").touch(), "adapters of peft"),
    "lost": (
        lambda f: (sharded(f), (f / "model-00002-of-00002.safetensors").unlink()),
        r"lacks files that .* names \(1\), such as model-00002-of-00002",
    ),
    "cut": (
        lambda f: (sharded(f), cut(f / "model-00001-of-00002.safetensors")),
        r"a ends at byte \d+ of a file of \d+ bytes: it was not copied whole",
    ),
    "elsewhere": (
        lambda f: changed_map(f, a="model-00002-of-00002.safetensors"),
        "a should be in model-00002-of-00002.safetensors",
    ),
    "unknown": (
        lambda f: changed_map(f, c="model-00001-of-00002.safetensors"),
        "c should be in .* and is in none",
    ),
    "outside": (lambda f: changed_map(f, c="../secret"), r"names \.\./secret: files must lie beside it"),
    "no index": (lambda f: (f / INDEX).write_text("[]"), "no index of safetensors files"),
    "both": (lambda f: (sharded(f), file(single(f), {"a": entry()}, bytes(8))), "two models"),
    "dtype": (
        lambda f: file(single(f), {"a": entry("F4")}, bytes(8)),
        r"a has dtype F4, which no checkpoint holds",
    ),
    "size": (
        lambda f: file(single(f), {"a": entry(shape=(3,))}, bytes(8)),
        r"a is F32\[3\], .* 12 bytes, and has 8",
    ),
    "longer": (lambda f: file(single(f), {"a": entry()}, bytes(9)), "its header says"),
    "header": (lambda f: single(f).write_bytes(b"\xff" * 16), "no safetensors file: a header of"),
    "malformed": (lambda f: file(single(f), {"a": {"dtype": "F32"}}, b""), "the entry of a is malformed"),
    "empty": (lambda f: file(single(f), {}, b""), "holds no tensor"),
    "code": (attack, r"names posix\.mkdir, .* it is not read"),
    "dotted": (
        lambda f: named("torch.distributed.checkpoint.filesystem", "os.mkdir", f),
        r"names torch\.distributed\.checkpoint\.filesystem\.os\.mkdir, .* it is not read",
    ),
    "imported": (
        lambda f: named("torch.distributed.checkpoint.metadata", "os", f),
        r"names torch\.distributed\.checkpoint\.metadata\.os, .* it is not read",
    ),
    "function": (
        lambda f: named("torch.distributed.checkpoint.metadata", "dataclass", f),
        r"names torch\.distributed\.checkpoint\.metadata\.dataclass, .* it is not read",
    ),
    "fetched": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps(Fetches(), 4)),
        r"fetches 'mro' of <class 'torch\.Size'>: it is not read",
    ),
    "infinite": (
        lambda f: raw(f, b'{"a":{"dtype":"F32","shape":[1e999,2],"data_offsets":[0,8]}}'),
        r"a has the shape \[inf, 2\], which is no list of whole numbers",
    ),
    "no number": (
        lambda f: raw(f, b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[NaN,8]}}'),
        r"a has the data_offsets \[nan, 8\]",
    ),
    "rounded": (
        lambda f: raw(f, b'{"a":{"dtype":"F32","shape":[2.9],"data_offsets":[0,8]}}'),
        r"a has the shape \[2\.9\]",
    ),
    "text": (
        lambda f: raw(f, b'{"a":{"dtype":"F32","shape":"2","data_offsets":[0,8]}}'),
        "a has the shape '2'",
    ),
    "negative": (lambda f: file(single(f), {"a": entry(shape=(-2,))}, bytes(8)), r"a has the shape \[-2\]"),
    "true": (
        lambda f: raw(f, b'{"a":{"dtype":"F32","shape":[true,2],"data_offsets":[0,8]}}'),
        r"a has the shape \[True, 2\]",
    ),
    "no dtype": (
        lambda f: raw(f, b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}'),
        "the entry of a is malformed",
    ),
    "deep": (lambda f: raw(f, b"[" * 200000), r"model\.safetensors .* nested too deeply"),
    "deep index": (lambda f: (f / INDEX).write_bytes(b"[" * 200000), "index.json .* nested too deeply"),
    "named twice": (
        lambda f: raw(f, b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)),
        "model.safetensors names 'a' twice",
    ),
    "file's name": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": 3}}'),
        "a is in 3, which is no file's name",
    ),
    "shared bytes": (
        lambda f: file(single(f), {"a": entry(), "b": entry(shape=(1,), offsets=(4, 8))}, bytes(8)),
        r"model\.safetensors: a ends at byte \d+ and b begins at \d+: two tensors share bytes",
    ),
    "half a character": (
        lambda f: raw(f, b'{"\\ud800":%s}' % json.dumps(entry()).encode()),
        r"the name '\\ud800' is no text that can be stored",
    ),
    "uncountable": (
        lambda f: file(single(f), {"a": entry(shape=(2**70, 0), offsets=(0, 0))}, b""),
        r"a has shape \[1180591620717411303424, 0\], more than the 9223372036854775807 elements",
    ),
    "another pickle": (
        lambda f: (f / ".metadata").write_bytes(b"\x80\x04K\x01K\x02\x93."),
        "cannot be read as an index",
    ),
    "changed index": (
        lambda f: changed_metadata(f, lambda m: m.state_dict_metadata["a"].chunks.__setitem__(0, 7)),
        r"\.metadata is malformed: AttributeError",
    ),
    "half": (
        lambda f: changed_metadata(f, lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([8]))),
        r"a of shape \[8\] has 8 elements, and its pieces hold 4",
    ),
    "twice": (
        lambda f: changed_metadata(f, lambda m: m.state_dict_metadata["a"].chunks.append(chunk(m))),
        r"a ends at byte \d+ and a begins at \d+: two tensors share bytes",
    ),
    "outside its shape": (
        lambda f: changed_metadata(f, lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([3]))),
        r"a at \[0\], size \[4\], leaves its shape \[3\]",
    ),
    "no metadata": (lambda f: (f / ".metadata").write_bytes(b"x"), "cannot be read as an index"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_the_name_of_what_is_wrong(name: str, tmp_path: Path) -> None:
    make, says = CASES[name]
    make(tmp_path)
    with pytest.raises(UnfitSourceError, match=says):
        read(tmp_path).below("")
    assert not (tmp_path / "ran").exists()


def test_a_prefix_that_nothing_has_is_refused_with_names_that_are_there(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert read(tmp_path).below("").names == {"a", "b"}
    with pytest.raises(UnfitSourceError, match=r"no tensor is named model\.…: there is a, b"):
        read(tmp_path).below("model.")


def test_nothing_is_written_before_the_files_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attack(tmp_path)
    where = ["--store", f"file://{tmp_path}/store", "--run-id", "base"]
    assert cli.main(["import", str(tmp_path), *where]) == 2
    assert "it is not read" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_member_of_an_enumeration_is_read_however_python_writes_it(tmp_path: Path) -> None:
    """Debian's Python 3.11.2 writes it as a call of getattr, later ones do not."""
    encoding = metadata._MEM_FORMAT_ENCODING

    class Member:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (encoding, "TORCH_CONTIGUOUS_FORMAT")

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Member(), 4))
    with pytest.raises(UnfitSourceError, match="no index that torch's FileSystemWriter has written"):
        read(tmp_path)


def test_a_store_that_refuses_a_shard_is_told_of_and_not_the_memory_that_the_error_holds(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1000))

    def refuse(view: memoryview) -> None:
        held = view[1:]  # as an upload has while it fails
        raise AccessDeniedError(f"{len(held)} bytes were not taken")

    with pytest.raises(AccessDeniedError, match="were not taken"), mapped(path) as view:
        refuse(view)

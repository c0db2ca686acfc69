"""The state digest: the same for every sharding, different for every change."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from trainer_sidecar.train import digest, native
from trainer_sidecar.train.boxes import Box, whole
from trainer_sidecar.train.layout import Layout, Placement, shard_boxes


@pytest.fixture(autouse=True, params=["compiled", "numpy"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with the compiled loop and without it."""
    found = native.load() if request.param == "compiled" else None
    if request.param == "compiled":
        assert found is not None, "setup compiles it: hatch_build.py"
    monkeypatch.setattr(digest, "_native", lambda: found)


def data(shape: tuple[int, ...], dtype: str = "<f4") -> np.ndarray:
    return np.random.default_rng(1).integers(0, 255, size=(*shape, np.dtype(dtype).itemsize), dtype=np.uint8)


def of(array: np.ndarray, place: Box, shape: tuple[int, ...], name: str = "w") -> int:
    return digest.box_digest(
        name, "float32", shape, place, np.ascontiguousarray(array[place.within(whole(shape))])
    )


@pytest.mark.parametrize("shape", [(97, 41), (300, 300), (5, 70_000), (17, 3, 9)])
@pytest.mark.parametrize(("mesh", "dims"), [((3,), (0,)), ((4,), (1,)), ((2, 3), (0, 1)), ((7,), (0,))])
def test_parts_of_any_sharding_add_up_to_the_whole(
    shape: tuple[int, ...], mesh: tuple[int, ...], dims: tuple[int, ...]
) -> None:
    array = data(shape)
    where = Layout(mesh, (), tuple(Placement(d) for d in dims))
    parts = [
        of(array, place, shape)
        for coordinate in itertools.product(*map(range, mesh))
        for place, _ in shard_boxes(shape, where, coordinate)
    ]
    assert digest.add(*parts) == of(array, whole(shape), shape)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_every_flipped_bit_shows(itemsize: int) -> None:
    array = np.zeros((50, itemsize), dtype=np.uint8)
    before = digest.box_digest("w", "x", (50,), whole((50,)), array)
    for bit in range(8 * itemsize):
        array[13, bit // 8] ^= 1 << bit % 8
        assert digest.box_digest("w", "x", (50,), whole((50,)), array) != before
        array[13, bit // 8] ^= 1 << bit % 8


def test_swapped_elements_and_swapped_tensors_show() -> None:
    array = data((64, 8))
    place, swapped = whole((64, 8)), array.copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    assert of(array, place, (64, 8)) != of(swapped, place, (64, 8))
    assert of(array, place, (64, 8), "a") != of(array, place, (64, 8), "b")


def test_both_words_depend_on_every_element() -> None:
    """A digest of which half stands still would be half as strong."""
    words = {
        (d >> 64, d & (1 << 64) - 1)
        for d in (digest.box_digest("w", "x", (1,), whole((1,)), np.array([v], "<u4")) for v in range(1000))
    }
    assert len({high for high, _ in words}) == 1000
    assert len({low for _, low in words}) > 990
    assert all(high >> 32 != low for high, low in words)


def test_the_digest_is_the_released_one() -> None:
    values = np.arange(1000, dtype="<f4")
    found = digest.box_digest("layer.weight", "float32", (10, 100), whole((10, 100)), values)
    assert digest.to_hex(found) == "54eb47783c101f83000001ed880cfe7f"


def test_no_elements_add_nothing() -> None:
    assert digest.box_digest("w", "x", (0, 4), Box((0, 0), (0, 4)), np.empty(0, np.uint8)) == 0


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ((70_001,), whole((70_001,))),
        ((300, 40), Box((17, 3), (211, 5))),
        ((5, 900), Box((1, 100), (3, 700))),
        ((2**20, 2**22, 3), Box((2**20 - 2, 5, 0), (2, 7, 3))),  # indices beyond 2^44
        ((0, 3), whole((0, 3))),
    ],
)
def test_the_compiled_loop_gives_what_numpy_gives(
    shape: tuple[int, ...], place: Box, itemsize: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.random.default_rng(itemsize).integers(0, 256, size=(*place.size, itemsize), dtype=np.uint8)
    anywhere = np.empty(array.nbytes + 1, dtype=np.uint8)[1:]
    anywhere[:] = array.reshape(-1)  # as in a file of weights: not aligned
    found = []
    for loop, data in (
        (native.load(), array),
        (native.load(), anywhere),
        (native.load(most=13), array),
        (None, array),
    ):
        assert loop is not None or len(found) == 3
        monkeypatch.setattr(digest, "_native", lambda loop=loop: loop)
        found.append(digest.box_digest("w", "x", shape, place, data))
    assert len(set(found)) == 1


def test_a_library_that_cannot_be_used_is_told_and_one_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert native.load(tmp_path / "none.so") is None
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"of another machine")
    assert native.load(broken) is None
    assert "digests take longer" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(native, "load", lambda: lambda *_: 5)
    digest._native.cache_clear()
    with pytest.raises(RuntimeError, match="build the package anew"):
        digest._native()
    digest._native.cache_clear()


def test_a_library_that_is_cut_off_is_not_loaded_and_ends_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a full disk leaves it: a page that is mapped and not there is a bus error in the middle of training."""
    whole = native.LIBRARY.read_bytes()
    for size in (0, 63, 4096, len(whole) - 1):
        cut = tmp_path / f"{size}.so"
        cut.write_bytes(whole[:size])
        assert native.load(cut) is None
        assert f"{cut} cannot be used, digests take longer: {size} bytes" in caplog.text

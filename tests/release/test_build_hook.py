"""A compiler that cannot be used leaves the compiled loop out; it never fails the build."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "compiler",
    ["cc '", "no-such-compiler", "false", "true"],
    ids=["a quote", "none", "fails", "makes nothing"],
)
def test_without_a_usable_compiler_the_library_is_left_out(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("CC", compiler)
    library = tmp_path / "libmix.so"
    library.write_bytes(b"of older sources")
    assert module.compiled(ROOT / "trainer_sidecar" / "train" / "mix.c", library) is False
    assert list(tmp_path.iterdir()) == []

"""Import rules that import-linter cannot hold: modules of Python itself, and a module that may use nothing else."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"rtj_operator": ROOT / "operator" / "rtj_operator", "trainer_sidecar": ROOT / "trainer_sidecar"}
PURE = [
    "rtj_operator.api",
    "rtj_operator.decide",
    "rtj_operator.mesh",
    "rtj_operator.pods",
    "trainer_sidecar.contract",
]
CLOCK_AND_CHANCE = {"random", "secrets", "time"}
EFFECTS = {"asyncio", "os", "shutil", "socket", "subprocess", "threading", "urllib"}


def source_of(module: str) -> Path | None:
    """The file of a module of ours, or None when there is none of that name."""
    package, *rest = module.split(".")
    base = PACKAGES[package].joinpath(*rest)
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def modules_below(module: str) -> Iterator[str]:
    """The module itself and, when it is a package, everything in it."""
    package, *rest = module.split(".")
    folder = PACKAGES[package].joinpath(*rest)
    for path in [folder.with_suffix(".py"), *sorted(folder.rglob("*.py"))]:
        if path.is_file():
            parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")])


def imports(module: str) -> Iterator[str]:
    """Every absolute name that a module imports, wherever in it, but for those under `if TYPE_CHECKING`."""
    path = source_of(module)
    assert path is not None, module
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in walk_runtime(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def walk_runtime(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from walk_runtime(node)


def reached(module: str) -> dict[str, str]:
    """Everything that importing `module` reaches: name → the module of ours that imports it."""
    found: dict[str, str] = {}
    queue, seen = list(modules_below(module)), set()
    while queue:
        current = queue.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imports(current):
            if name.split(".")[0] not in PACKAGES:
                found.setdefault(name.split(".")[0], current)
            elif source_of(name) is not None:
                queue.append(name)
    return found


@pytest.mark.parametrize("module", PURE)
def test_the_pure_core_reaches_no_clock_no_chance_and_no_effects(module: str) -> None:
    if source_of(module) is None:
        pytest.fail(f"{module} does not exist")
    found = reached(module)
    forbidden = {name: found[name] for name in (CLOCK_AND_CHANCE | EFFECTS) & found.keys()}
    assert not forbidden, f"{module} reaches {forbidden}: pass the value in instead"


def test_the_launcher_uses_only_the_standard_library() -> None:
    """It is shipped as a zipapp into images that know nothing of this project."""
    outside = {
        name: by
        for name, by in reached("trainer_sidecar.launch").items()
        if name not in sys.stdlib_module_names
    }
    own = {name for module in modules_below("trainer_sidecar.launch") for name in imports(module)}
    own = {
        name
        for name in own
        if name.split(".")[0] in PACKAGES and not name.startswith("trainer_sidecar.launch")
    }
    assert not outside
    assert not own


def test_the_rules_see_an_import_inside_a_function_and_a_relative_one(tmp_path, monkeypatch) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").write_text('"""Sample."""\n')
    (package / "core.py").write_text("def f():\n    from . import inner\n")
    (package / "inner.py").write_text("import time\n")
    monkeypatch.setitem(PACKAGES, "sample", package)
    assert reached("sample.core") == {"time": "sample.inner"}

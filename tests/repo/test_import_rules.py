"""The import rules as tests: the contracts of import-linter, and the one that it has no contract for."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "trainer_sidecar" / "launch.py"


def imported_roots(source: str) -> Iterator[str]:
    """First names of everything that a module imports, wherever in it; a relative import gives an empty name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else str(node.module).split(".")[0]


def test_the_import_contracts_of_pyproject_hold() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    checked = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions and for type checkers included: a circle there is one of meaning, too."""
    graph = grimp.build_graph("rtj_operator", "trainer_sidecar", cache_dir=None)
    TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()


def test_the_launcher_uses_only_the_standard_library() -> None:
    """It is shipped as a zipapp into images that know nothing of this project."""
    outside = set(imported_roots(LAUNCHER.read_text(encoding="utf-8"))) - sys.stdlib_module_names
    assert outside == set()


def test_the_rule_for_the_launcher_sees_imports_inside_functions_and_relative_ones() -> None:
    source = "def f():\n    import torch.nn\n    from . import cli\n    from os import path\n"
    assert set(imported_roots(source)) == {"torch", "", "os"}

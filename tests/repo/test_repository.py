"""Guards for what a reviewer would otherwise have to remember."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [ROOT / "operator" / "rtj_operator", ROOT / "trainer_sidecar"]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
# Any address that serves packages, whoever runs it: such addresses belong to a machine, not to a project.
REGISTRY = re.compile(
    r"https?://[\w.-]*(?:index|proxy|files|registry|repo\d?|mirror|deb)\b[\w.:-]*/|https?://[\w.:-]+/(?:[\w./-]*/)?(?:simple|@v|pool)/",
    re.IGNORECASE,
)


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def lines_that_match(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT)
        found += [f"{name}: {line[:120]}" for line in text.splitlines() if pattern.search(line)]
    return found


def test_the_operator_folder_does_not_shadow_pythons_own_module() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import collections, operator; assert operator.eq(1, 1)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_address_of_a_package_registry_is_in_the_repository() -> None:
    assert lines_that_match(REGISTRY) == []


@pytest.mark.parametrize(
    "address", ["index.example/x", "example.org/simple/", "deb.example/debian", "a.b/c/@v/v1.zip"]
)
def test_the_pattern_for_registries_finds_the_usual_shapes(address: str) -> None:
    assert REGISTRY.search(f"https://{address}")


def test_no_path_of_the_machine_is_in_the_repository() -> None:
    """Paths into this checkout, and into the dotted folders of the home that only a developer's machine has."""
    places = [f"{Path.home()}/."] + ([f"{ROOT}/"] if len(ROOT.parts) > 2 else [])
    assert lines_that_match(re.compile("|".join(map(re.escape, places)))) == []


@pytest.mark.parametrize(
    "name",
    ["requirements/dev.txt", "requirements/operator.txt", "requirements/sidecar.txt", "requirements/uv.txt"],
)
def test_a_lock_names_no_host(name: str) -> None:
    assert "://" not in (ROOT / name).read_text(encoding="utf-8")


def test_the_images_hold_no_torch() -> None:
    for name in ("operator.txt", "sidecar.txt"):
        assert not re.search(
            r"^(torch|nvidia|triton)", (ROOT / "requirements" / name).read_text(), re.MULTILINE
        )


def test_the_lock_matches_pyproject() -> None:
    checked = subprocess.run(
        [sys.executable, "hack/check_requirements.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_every_command_that_the_documents_name_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= targets
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:`|^\s*)make ([a-z][a-z-]*)", (ROOT / name).read_text(), re.MULTILINE))
        assert named, name
        assert named <= targets, f"{name}: {named - targets}"


def test_the_readme_and_ci_run_the_same_test_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^\s*make demo\b", readme, re.MULTILINE)
    assert re.search(r"^\s*make test\b", readme, re.MULTILINE)
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_why_it_exists(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [path.relative_to(ROOT) for path in MODULES if path.name in drawers] == []


def test_the_page_on_the_operators_files_names_each_module_once_and_none_that_is_gone() -> None:
    page = (ROOT / "docs" / "design" / "0000-parts-and-contracts.md").read_text()
    table = page.partition("## Which file of the operator to open")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")]
    named = sorted(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    root = ROOT / "operator" / "rtj_operator"
    decide = [str(path.relative_to(root)) for path in (root / "decide").rglob("*.py")]
    drills = [f"drills/{path.name}" for path in (root / "drills").glob("[!_]*.py")]
    flat = [path.name for path in root.glob("*.py") if path.name != "__init__.py"]
    assert named == sorted([*flat, *decide, *drills, "api/", "pods/"])


def test_each_script_can_be_run() -> None:
    scripts = [path for path in tracked_files() if path.suffix == ".sh" or path == ROOT / ".ci" / "run"]
    assert [path.name for path in scripts if not path.stat().st_mode & 0o100] == []

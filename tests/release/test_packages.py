"""Wheel and sdist build without a network and install into a clean environment, with every command of theirs."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from trainer_sidecar import __version__

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("kubectl-rtj", "kubectl_complete-rtj", "rtj", "rtj-launch", "rtj-operator", "rtj-sidecar")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def hatchling(folder: Path, *words: str, cwd: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, *words, cwd=cwd)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hatchling(tmp_path_factory.mktemp("sdist"), "-t", "sdist", cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as whoever packages it for a distribution would."""
    folder = tmp_path_factory.mktemp("unpacked")
    run("tar", "-xzf", sdist, "-C", folder)  # tarfile's filters came with a patch release of 3.11
    return hatchling(
        tmp_path_factory.mktemp("wheel"), "-t", "wheel", cwd=folder / sdist.name.removesuffix(".tar.gz")
    )


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with nothing but the wheel."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    run(Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--offline", "--no-deps",
        "--python", folder / "bin" / "python", wheel)  # fmt: skip
    return folder


def test_the_wheel_holds_every_module_of_both_packages_with_types_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name == f"resumable_training-{__version__}-py3-none-manylinux_2_17_{platform.machine()}.whl"
    assert "trainer_sidecar/train/libmix.so" in names
    for package in (ROOT / "trainer_sidecar", ROOT / "operator" / "rtj_operator"):
        wanted = {str(path.relative_to(package.parent)) for path in package.rglob("*.py")}
        assert wanted - names == set()
        assert f"{package.name}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {
        "trainer_sidecar", "rtj_operator", f"resumable_training-{__version__}.dist-info",
    }  # fmt: skip


def test_the_compiled_loop_needs_no_library(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        library = packed.extract("trainer_sidecar/train/libmix.so", tmp_path)
    assert "NEEDED" not in run("readelf", "--dynamic", library), "any glibc will do, as the wheel's tag says"


def test_without_a_compiler_the_wheel_is_one_of_pure_python(
    sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("tar", "-xzf", sdist, "-C", tmp_path)
    monkeypatch.setenv("CC", "/nowhere/cc")
    built = hatchling(tmp_path / "out", "-t", "wheel", cwd=tmp_path / sdist.name.removesuffix(".tar.gz"))
    assert built.name == f"resumable_training-{__version__}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith((".so", ".pyd"))]


def test_the_launcher_runs_without_any_dependency(clean: Path) -> None:
    assert run(clean / "bin" / "rtj-launch", "--help").startswith("usage: rtj-launch")
    python = clean / "bin" / "python"
    said = run(
        python,
        "-c",
        "import trainer_sidecar as t, rtj_operator as o; print(t.__file__, o.__file__)",
        cwd=clean,
    )
    assert said.count(str(clean)) == 2
    assert sorted(path.name for path in (clean / "bin").glob("*rtj*")) == sorted(COMMANDS)


def test_with_its_dependencies_every_command_tells_what_it_does(clean: Path) -> None:
    """The dependencies are those of the tests' environment; the packages are those of the wheel."""
    site = Path(
        run(clean / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert run(clean / "bin" / "rtj", "--version") == f"rtj {__version__}\n"
    assert run(clean / "bin" / "rtj-operator", "--version") == f"rtj-operator {__version__}\n"
    assert "usage: kubectl rtj" in run(clean / "bin" / "kubectl-rtj", "--help")
    asked = "import rtj_operator.main as o, trainer_sidecar.sidecar.main as s; print(o.__file__, s.__file__)"
    assert run(clean / "bin" / "python", "-c", asked, cwd=clean).count(str(site)) == 2

"""The images as they are built: labels, and a bill of materials that lists what their own Python holds.

The target `trainer` holds 5 GB of torch and is built by hand; what is built here is its sibling for bases with a torch
of their own, which differs in where the packages come from.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from trainer_sidecar import __version__

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hack.check_requirements import read_pins  # noqa: E402

OURS = {
    "operator": {"__init__.py", "contract", "store"},
    "sidecar": {"__init__.py", "contract", "launch.py", "sidecar", "store"},
}
"""Of the training side."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


TAGS = {
    "operator": "localhost/rtj-operator:dev",
    "sidecar": "localhost/rtj-sidecar:operator-test",
    "trainer-from-base": "localhost/rtj-trainer:from-base",
}


def built(target: str) -> Path:
    """The docker archive of a target; not built again where the tests on the cluster have done so."""
    tool = str(ROOT / "hack" / "cluster")
    command = [sys.executable, tool, "image", "build", "--target", target, "--tag", TAGS[target]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return Path(done.stdout.split()[-1])


def opened(archive: Path) -> tuple[dict[str, str], dict[str, bytes], set[str]]:
    """Labels, bills of materials by path, and names of all files of an image."""
    names: set[str] = set()
    bills: dict[str, bytes] = {}
    with tarfile.open(archive) as image:
        (manifest,) = json.loads(_read(image, "manifest.json"))
        labels: dict[str, str] = json.loads(_read(image, manifest["Config"]))["config"]["Labels"]
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=io.BytesIO(_read(image, layer))) as files:
                found = files.getnames()
                names |= set(found)
                bills |= {name: _read(files, name) for name in found if name.endswith(".cdx.json")}
    return labels, bills, names


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    found = archive.extractfile(name)
    assert found is not None, name
    return found.read()


@pytest.mark.parametrize("target", ["operator", "sidecar"])
def test_an_image_has_its_labels_and_a_bill_that_lists_what_it_holds(target: str) -> None:
    labels, bills, names = opened(built(target))
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}version"] == __version__
    assert (labels[f"{prefix}title"], labels[f"{prefix}licenses"]) == (f"rtj-{target}", "Apache-2.0")
    assert {f"{prefix}revision", f"{prefix}source"} <= set(labels)
    (found,) = bills.items()
    assert found[0] == f"sbom/rtj-{target}.cdx.json"
    bill = json.loads(found[1])
    assert {c["name"]: {c["version"]} for c in bill["components"]} == read_pins(
        ROOT / "requirements" / f"{target}.txt"
    )
    ours = {
        found[1]
        for name in names
        if (found := re.fullmatch(r"opt/rtj/.*/trainer_sidecar/([^/]+)(/.*)?", name))
    }
    assert ours - {"__pycache__"} == OURS[target], "nothing that cannot be imported there"
    installed = {name.split("/")[-1] for name in names if re.fullmatch(r"opt/rtj/.*\.dist-info", name)}
    assert len(installed) == len(bill["components"])
    assert not [name for name in installed if name.startswith(("pip-", "setuptools-"))]
    compiled = {found[1] for name in names if (found := re.search(r"/(\w+)\.cpython-\d+\.pyc$", name))}
    assert {"argparse", "plan"} <= compiled, "of Python itself and of ours: a start compiles nothing"


LIBRARY = {"__init__.py", "contract", "dcp", "integrations", "launch.py", "py.typed", "store", "train"}
INSIDE = """
import os, sys
sys.path.append("/torch")  # behind the image's own packages
import boto3, pydantic, torch
import trainer_sidecar.dcp, trainer_sidecar.store.open
from trainer_sidecar.train import Session
files = [module.__file__ for module in (pydantic, boto3, trainer_sidecar, torch)]
print(os.getuid(), os.getcwd(), Session.__name__, *files)
"""


def test_the_library_goes_into_an_image_that_brings_torch_and_runs_there(tmp_path: Path) -> None:
    """The base has no torch; this machine's stands in for that of a base image, which is not on any disk here."""
    archive = built("trainer-from-base")
    labels, bills, names = opened(archive)
    assert labels["org.opencontainers.image.title"] == "rtj-trainer"
    ((path, text),) = bills.items()
    assert path == "sbom/rtj-trainer.cdx.json"
    listed = {c["name"]: {c["version"]} for c in json.loads(text)["components"]}
    assert listed == read_pins(ROOT / "requirements" / "sidecar.txt")
    found = (re.fullmatch(r"usr/local/lib/.*/trainer_sidecar/([^/]+)(/.*)?", name) for name in names)
    assert {match[1] for match in found if match} - {"__pycache__"} == LIBRARY
    assert not [name for name in names if name.startswith(("src/", "locks/"))], "nothing of the build"
    uid, folder, session, *files = inside(tmp_path, archive, INSIDE)
    assert (uid, folder, session) == ("65532", "/workspace", "Session")
    assert [file.split("/")[1] for file in files] == ["usr", "usr", "usr", "torch"]


def inside(folder: Path, archive: Path, code: str) -> list[str]:
    """Words that Python code prints in an image, as its user, with this machine's packages at /torch."""
    tool = ["buildah", f"--root={folder}/storage", f"--runroot={folder}/run", "--storage-driver=overlay"]
    packages = f"{sysconfig.get_path('purelib')}:/torch:ro"

    def do(*words: str) -> str:
        done = subprocess.run([*tool, *words], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    try:
        container = do("from", f"docker-archive:{archive}").split()[-1]
        run = ("run", "--isolation=chroot", f"--volume={packages}", container, "--", "python3", "-c", code)
        return do(*run).split()
    finally:
        subprocess.run([*tool, "rm", "--all"], capture_output=True, timeout=60, check=False)
        subprocess.run(["umount", f"{folder}/storage/overlay"], capture_output=True, timeout=60, check=False)

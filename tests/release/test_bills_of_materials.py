"""The bill of materials of an image lists the pins of its lock; dependencies come under licences that are allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hack.check_requirements import read_pins  # noqa: E402
from hack.reference import licences_reference  # noqa: E402
from hack.release import licences, sbom  # noqa: E402
from trainer_sidecar import __version__  # noqa: E402

LOCK = "one==1.0 \\\n    --hash=sha256:" + "a" * 64 + " \\\n    --hash=sha256:" + "b" * 64 + "\n"


@pytest.mark.parametrize("image", ["operator", "sidecar", "trainer"])
def test_a_bill_lists_every_pin_of_the_images_lock_with_hashes_and_licence(image: str) -> None:
    lock = ROOT / "requirements" / f"{image}.txt"
    command = [sys.executable, "-m", "hack.release.sbom", str(lock), "--name", f"rtj-{image}"]
    bill = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == (
        f"rtj-{image}",
        __version__,
    )
    listed: dict[str, set[str]] = {}
    for component in bill["components"]:
        listed.setdefault(component["name"], set()).add(component["version"])
    assert listed == read_pins(lock)
    for component in bill["components"]:
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"
        hashes = [p["value"] for p in component["properties"] if p["name"] == "rtj:lock:sha256"]
        assert {len(value) for value in hashes} == {64}
        assert component["licenses"]
    assert sorted(bill["dependencies"][0]["dependsOn"]) == sorted(c["bom-ref"] for c in bill["components"])


def test_a_bill_is_refused_where_the_environment_is_not_the_lock_s() -> None:
    (pin,) = sbom.pins(LOCK)
    assert (pin.name, pin.version, len(pin.hashes), pin.marker) == ("one", "1.0", 2, "")
    assert sbom.differences([pin], {"one": "1.0"}) == []
    assert sbom.differences([pin], {"one": "1.1", "pip": "23"}) == [
        "one: the lock has 1.0, installed is 1.1",
        "pip: the lock has None, installed is 23",
    ]
    with pytest.raises(ValueError, match="two"):
        sbom.pins(LOCK + "two==2\n")


def test_a_marker_of_the_lock_is_read() -> None:
    (pin,) = sbom.pins(LOCK.replace("one==1.0 \\", "one==1.0 ; sys_platform == 'win32' \\"))
    assert pin.marker == "sys_platform == 'win32'"


def test_pins_of_other_pythons_and_platforms_are_no_difference_and_other_versions_are() -> None:
    marked = LOCK.replace("one==1.0 \\", "one==1.0 ; python_version < '3' \\") + LOCK.replace("1.0", "2.0")
    older, newer = sbom.pins(marked)
    assert sbom.here([older, newer], {"one": "2.0"}) == [newer]
    assert sbom.here([older], {}) == []
    assert sbom.differences(sbom.here([older], {"one": "3.0"}), {"one": "3.0"}) == [
        "one: the lock has None, installed is 3.0"
    ]


def test_licences_are_known_and_allowed_where_they_are_used() -> None:
    """The page is made of them, and raises for any other."""
    page = licences_reference.page()
    images, training, rest = licences_reference.names()
    assert {"boto3", "kopf", "pydantic"} <= set(images)
    assert "torch" in training
    assert "pytest" in rest
    assert "| certifi | MPL-2.0 |" in page


class Declared(Distribution):
    """A distribution that says nothing but this."""

    def __init__(self, **fields: str) -> None:
        self.fields = fields

    @property
    def metadata(self) -> Any:
        message = Message()
        message["Name"] = "thing"
        for name, value in self.fields.items():
            message[name.replace("_", "-")] = value
        return message

    def read_text(self, filename: str) -> None:
        return None

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        ({"License_Expression": "MIT OR Apache-2.0"}, "MIT OR Apache-2.0"),
        ({"License": "Apache 2.0"}, "Apache-2.0"),
        ({"License": "BSD 3-Clause License\n\nCopyright"}, "BSD-3-Clause"),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, "MIT"),
    ],
)
def test_a_licence_is_read_from_what_a_package_declares(fields: dict[str, str], expression: str) -> None:
    assert licences.declared(Declared(**fields)) == expression


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"License": "BSD"},
        {"License": "see LICENSE"},
        {"License_Expression": "AGPL-3.0-only"},
        {"License_Expression": "MIT AND SSPL-1.0"},
        {"Classifier": "License :: OSI Approved :: BSD License"},
    ],
)
def test_an_unknown_licence_is_refused_with_what_to_do(fields: dict[str, str]) -> None:
    with pytest.raises(licences.UnknownLicenceError, match=r"thing: .*enter it in"):
        licences.declared(Declared(**fields))


def test_a_licence_that_may_not_be_in_an_image_is_refused_there_only() -> None:
    assert licences.refused(["codespell"], licences.IN_IMAGES) == [
        "codespell: GPL-2.0-only is not allowed here"
    ]
    assert licences.refused(["codespell"], licences.ON_DEVELOPERS_MACHINES) == []

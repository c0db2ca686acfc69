"""The list of what is in an image (CycloneDX 1.6, JSON), from the lock that the image was installed from.

    python -m hack.release.sbom requirements/operator.txt --name rtj-operator --installed > sbom.json

`--installed` is for the build of an image: it proves that the environment holds the lock's pins and nothing else, but
for what `--beside` names (it is listed, too); `--among-others` leaves out of account what an image's base brought. Same
inputs give the same bytes: no time, no serial number. Standard library only, since it runs inside that build.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hack.release.licences import OWN, licence_of
from trainer_sidecar import __version__

_PIN = re.compile(
    r"^(?P<name>[\w.-]+)(?:\[[^]]*\])?==(?P<version>[^\s;\\]+)(?P<rest>(?:.*\\\n)*.*)$", re.MULTILINE
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    """One line of a lock: `hashes` are those of all files of that version, of which an image has one."""

    name: str
    version: str
    hashes: tuple[str, ...]
    marker: str
    """Where it is installed (PEP 508); empty: everywhere. Of the images' locks only the trainer's has some."""


def canonical(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: str) -> list[Pin]:
    """The pins of a lock, by name. Raises ValueError for one without a hash."""
    found = [_pin(match) for match in _PIN.finditer(lock)]
    if bare := [pin.name for pin in found if not pin.hashes]:
        raise ValueError(f"these pins have no hash: {', '.join(bare)}; run `make lock`")
    return sorted(found, key=lambda pin: pin.name)


def _pin(match: re.Match[str]) -> Pin:
    marker = match["rest"].partition("\n")[0].strip(" ;\\")
    return Pin(canonical(match["name"]), match["version"], tuple(_HASH.findall(match["rest"])), marker)


def differences(wanted: list[Pin], installed: dict[str, str]) -> list[str]:
    """One sentence for each package that is not what the lock says; `installed` is versions by name."""
    versions = {pin.name: pin.version for pin in wanted}
    return [
        f"{name}: the lock has {versions.get(name)}, installed is {installed.get(name)}"
        for name in sorted(versions.keys() | installed.keys())
        if versions.get(name) != installed.get(name)
    ]


def here(wanted: list[Pin], installed: dict[str, str]) -> list[Pin]:
    """The pins that concern this environment: those without a marker, and of the others those that are installed."""
    return [pin for pin in wanted if not pin.marker or installed.get(pin.name) == pin.version]


def document(name: str, wanted: list[Pin]) -> dict[str, Any]:
    """The bill of materials of image `name`."""
    own = {
        "type": "container",
        "bom-ref": name,
        "name": name,
        "version": __version__,
        "licenses": _licences(OWN),
    }
    components = [_component(pin) for pin in wanted]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": name, "dependsOn": [c["bom-ref"] for c in components]}],
    }


def _component(pin: Pin) -> dict[str, Any]:
    url = f"pkg:pypi/{pin.name}@{pin.version}"
    return {
        "type": "library",
        "bom-ref": url,
        "name": pin.name,
        "version": pin.version,
        "purl": url,
        "licenses": _licences(licence_of(pin.name)),
        # Of a release's files, one of which is installed: the platform decides which.
        "properties": [{"name": "rtj:lock:sha256", "value": value} for value in pin.hashes]
        + ([{"name": "rtj:lock:marker", "value": pin.marker}] if pin.marker else []),
    }


def _licences(expression: str) -> list[dict[str, Any]]:
    if " " in expression:
        return [{"expression": expression}]
    return [{"license": {"name" if expression.startswith("LicenseRef-") else "id": expression}}]


def main() -> int:
    """Print the document; 1 when the environment is not the lock's."""
    parser = argparse.ArgumentParser(
        prog="python -m hack.release.sbom", description="Bill of materials of an image."
    )
    parser.add_argument("lock", type=Path, metavar="LOCK")
    parser.add_argument("--name", required=True, help="name of the image")
    parser.add_argument(
        "--installed", action="store_true", help="fail unless exactly the pins are installed here"
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="NAME",
        help="may be installed though no pin names it",
    )
    parser.add_argument("--among-others", action="store_true", help="ignore what no pin names")
    options = parser.parse_args()
    wanted = pins(options.lock.read_text(encoding="utf-8"))
    if options.installed:
        installed = {canonical(d.metadata["Name"]): d.version for d in distributions()}
        wanted = here(wanted, installed)
        wanted += [Pin(name, installed[name], (), "") for name in options.beside if name in installed]
        named = {pin.name for pin in wanted}
        if options.among_others:
            installed = {name: version for name, version in installed.items() if name in named}
        if found := differences(wanted, installed):
            print("\n".join(found), file=sys.stderr)
            return 1
    print(json.dumps(document(options.name, wanted), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

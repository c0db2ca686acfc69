"""Proves, without a network, that requirements/*.txt still match pyproject.toml.

Every direct dependency must be pinned in the lock files that install it, with a hash and at a version that its
specifier allows; the images' locks must pin what the tests ran with. Nothing is resolved here: `make lock` does that.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(
    r"^(?P<name>[\w.-]+)(\[[^]]*\])?==(?P<version>[^\s;\\]+)(?P<rest>(.*\\\n)*.*)$", re.MULTILINE
)

IMAGES = (
    "operator.txt",
    "sidecar.txt",
    "trainer.txt",
)  # these pin what the tests ran with; the others have environments of their own

Pins = dict[str, set[str]]


def read_pins(path: Path) -> Pins:
    """Versions by canonical name; a universal lock may pin one name at several versions, split by markers."""
    pins: Pins = defaultdict(set)
    for match in PIN.finditer(path.read_text(encoding="utf-8")):
        if "--hash=sha256:" not in match["rest"]:
            raise ValueError(f"{path.name}: {match['name']} has no hash; run `make lock`")
        pins[canonicalize_name(match["name"])].add(match["version"])
    return pins


def group(project: dict[str, Any], name: str) -> list[str]:
    """The requirements of a dependency group, with those of the groups that it includes."""
    found: list[str] = []
    for entry in project["dependency-groups"][name]:
        found += [entry] if isinstance(entry, str) else group(project, entry["include-group"])
    return found


def direct_dependencies(project: dict[str, Any]) -> dict[str, list[str]]:
    """What each lock file must hold, by the file's name."""
    base: list[str] = project["project"]["dependencies"]
    extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
    return {
        "sidecar.txt": base,
        "trainer.txt": base + extras["train"],
        "operator.txt": base + extras["operator"],
        "dev.txt": base + extras["operator"] + extras["train"] + group(project, "dev"),
        "peers.txt": group(project, "peers"),
        "torchtitan.txt": base + extras["train"] + group(project, "torchtitan"),
        "uv.txt": group(project, "uv"),
    }


def differences(wanted: list[str], pins: Pins, name: str) -> Iterator[str]:
    """One sentence for each direct dependency that the lock lacks or pins outside its specifier."""
    for requirement in map(Requirement, wanted):
        versions = pins.get(canonicalize_name(requirement.name), set())
        if not versions:
            yield f"{name}: {requirement.name} is not pinned"
        for version in sorted(versions):
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"{name}: {requirement.name}=={version} is outside {requirement.specifier}"


def main() -> int:
    """Prints every difference and returns 1 when there is one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tested = read_pins(ROOT / "requirements" / "dev.txt")
    found: list[str] = []
    for name, wanted in direct_dependencies(project).items():
        pins = read_pins(ROOT / "requirements" / name)
        found += differences(wanted, pins, name)
        if name in IMAGES:
            found += [f"{name}: {pin} differs from dev.txt" for pin in pins if pins[pin] != tested[pin]]
    for line in found:
        print(f"{line}; run `make lock`", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

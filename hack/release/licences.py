"""Under which licence each dependency comes, as an SPDX expression, read from what is installed.

Older packages say it in free text or by a classifier only; what such words mean stands in a table here, and what no
table knows is refused instead of passed on as text. Standard library only: it runs inside the build of an image, too.
"""

import re
from importlib.metadata import Distribution, distribution

OWN = "Apache-2.0"

PERMISSIVE = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Zlib",
}  # fmt: skip
WEAK_COPYLEFT = {"MPL-2.0"}
"""A change of its files is published under it; what uses it is not touched."""
IN_IMAGES = PERMISSIVE | WEAK_COPYLEFT
BESIDE_TORCH = IN_IMAGES | {"LicenseRef-NVIDIA-Proprietary"}
"""What torch's CUDA build pulls in: users install it, or the image `trainer` when they build it."""
ON_DEVELOPERS_MACHINES = BESIDE_TORCH | {"GPL-2.0-only", "LicenseRef-Matplotlib"}
"""Programs that are run, never linked and never handed on."""

_TEXTS = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "bsd 2-clause license": "BSD-2-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "isc license": "ISC",
    "nvidia proprietary software": "LicenseRef-NVIDIA-Proprietary",
}
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
_READ = {
    "colorama": "BSD-3-Clause",
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
    "cycler": "BSD-3-Clause",
    "itsdangerous": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "LicenseRef-Matplotlib",
    "mpmath": "BSD-3-Clause",
    "nodeenv": "BSD-3-Clause",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "torchdata": "BSD-3-Clause",
    "uv": "MIT OR Apache-2.0",  # installs the others, and is not installed beside them
}
"""Read by a person in the licence file, because the metadata says nothing definite ("BSD", "Dual License")."""


class UnknownLicenceError(ValueError):
    """A dependency whose licence the tables above cannot name."""


def licence_of(name: str) -> str:
    """SPDX expression of a dependency by its canonical name. Raises UnknownLicenceError, PackageNotFoundError."""
    return _READ.get(name) or declared(distribution(name))


def declared(found: Distribution) -> str:
    """SPDX expression that a distribution's metadata give. Raises UnknownLicenceError."""
    metadata = found.metadata
    texts = metadata.get_all("License-Expression") or metadata.get_all("License") or [""]
    line = str(texts[0]).strip().partition("\n")[0].strip()
    if line and parts(line) <= ON_DEVELOPERS_MACHINES:
        return line
    if line.lower() in _TEXTS:
        return _TEXTS[line.lower()]
    classifiers = [
        c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")
    ]
    told = {_CLASSIFIERS[c] for c in classifiers if c in _CLASSIFIERS}
    if len(told) != 1:
        raise UnknownLicenceError(
            f"{metadata['Name']}: no licence can be told from License {line[:60]!r} and classifiers {classifiers}: "
            "read its licence file and enter it in hack/release/licences.py"
        )
    return told.pop()


def parts(expression: str) -> set[str]:
    """The licences that an expression names, joined by AND or OR."""
    return {part.strip("() ") for part in re.split(r" (?:AND|OR) ", expression)}


def refused(names: list[str], allowed: set[str]) -> list[str]:
    """One sentence for each dependency with a licence that is not allowed where it is used."""
    told = {name: licence_of(name) for name in names}
    return [
        f"{name}: {expression} is not allowed here"
        for name, expression in told.items()
        if not parts(expression) <= allowed
    ]

"""What each flag of the operator may be, asked once at its start: a value that only a job's look would stumble over is
refused before the operator is Ready. The chart's schema has the same patterns, so that helm refuses most of it earlier.

Pure: no cluster is asked whether an image or a Secret exists.
"""

import re
import shlex
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

_SUFFIX = r"([eE][+-]?[0-9]{1,2}|Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?"
QUANTITY = rf"^([0-9]*[1-9][0-9]*([.][0-9]*)?|[0-9]*[.][0-9]*[1-9][0-9]*){_SUFFIX}$"
"""Above 0."""
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
REPOSITORY = rf"^(([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:]+\])(:[0-9]+)?/)?{_PART}(/{_PART})*$"
TAG = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"
DIGEST = r"^sha256:[0-9a-f]{64}$"
IMAGE = rf"{REPOSITORY[:-1]}(:{TAG[1:-1]})?(@{DIGEST[1:-1]})?$"
NAMESPACE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
ENDPOINT = r"^https?://[^/?#@ ,]+/?$"
URL_PREFIX = r"^s3://[^ ,]*$"
REGION = r"^[A-Za-z0-9-]+$"

_Check = Callable[[str], str]
"""What a value must be, when it is not; empty when it is."""


@dataclass(frozen=True)
class _Form:
    check: _Check
    empty: bool = False
    """Whether an empty value means something."""
    several: bool = False
    """Comma-separated."""


def _like(pattern: str, form: str) -> _Check:
    return lambda text: "" if re.fullmatch(pattern, text) else form


def _one_of(*words: str) -> _Check:
    return lambda text: "" if text in words else f"one of {', '.join(words)}"


def _between(least: int, most: int) -> _Check:
    def check(text: str) -> str:
        fits = text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most
        return "" if fits else f"a whole number from {least} to {most}"

    return check


def _words_of_a_shell(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as exc:
        return f"words as a shell reads them ({exc})"
    return ""


_QUANTITY = _Form(_like(QUANTITY, "a Kubernetes quantity above 0, as in 250m or 512Mi"))
_ENDPOINT = _like(ENDPOINT, "http(s)://host[:port] without path or user")
_SECRET = _like(OBJECT_NAME, "the name of a Secret: lower-case letters, digits, '-' and '.'")
FORMS: dict[str, _Form] = {
    "namespaces": _Form(
        _like(NAMESPACE, "the name of a namespace: lower-case letters, digits and '-'"), True, True
    ),
    "sidecar_image": _Form(_like(IMAGE, "an image, as in registry/rtj-sidecar:1.2.3")),
    "sidecar_pull_policy": _Form(_one_of("Always", "IfNotPresent", "Never"), empty=True),
    "sidecar_command": _Form(_words_of_a_shell, empty=True),
    "sidecar_cpu": _QUANTITY,
    "sidecar_cpu_limit": _QUANTITY,
    "sidecar_memory": _QUANTITY,
    "sidecar_user": _Form(_between(1, 2**31 - 1)),
    "trainer_python": _Form(_like(r"^[^\s]+$", "a program of the trainer's image, as in python3")),
    "store_endpoint": _Form(_ENDPOINT, empty=True),
    "store_region": _Form(_like(REGION, "a region: letters, digits and '-'"), empty=True),
    "store_secret": _Form(_SECRET),
    "allowed_secrets": _Form(_SECRET, True, True),
    "allowed_url_prefixes": _Form(
        _like(URL_PREFIX, "s3:// (any bucket), s3://bucket or s3://bucket/prefix"), True, True
    ),
    "allowed_endpoints": _Form(_ENDPOINT, True, True),
    "metrics_port": _Form(_between(0, 65535)),
    "workers": _Form(_between(1, 1024)),
    "log_level": _Form(lambda text: _one_of("DEBUG", "INFO", "WARNING", "ERROR")(text.upper())),
    "log_format": _Form(_one_of("text", "json")),
}
"""By the flag's name in Python. Others take any text, or are read where they are used."""


def problems(options: Namespace, prefix: str) -> list[str]:
    """A sentence for each flag with a value that it cannot have; `prefix` is that of the environment variables."""
    found = []
    for name, form in FORMS.items():
        given = str(getattr(options, name))
        texts = [w.strip() for w in given.split(",") if w.strip()] if form.several else [given]
        wanted = next((w for text in texts if (text or not form.empty) and (w := form.check(text))), "")
        if wanted:
            found.append(f"{_called(name, prefix)} is {given!r}, and must be {wanted}")
    return found


def _called(name: str, prefix: str) -> str:
    return f"--{name.replace('_', '-')} ({prefix}{name.upper()})"

"""The chart as helm renders it, and the programs that judge it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes.client
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hack.cache_folder import cache_folder  # noqa: E402

CHART = ROOT / "charts" / "rtj-operator"


def run(*command: str, ok: bool = True) -> str:
    """Output of a program. Fails the test unless it ends as `ok` says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) is ok, f"{' '.join(command)}: {said[-3000:]}"
    return said


def helm() -> str:
    """The helm that the local cluster is built with; the cluster need not run."""
    run(sys.executable, str(ROOT / "hack" / "cluster"), "build")
    cache = cache_folder()
    found = sorted(cache.glob("bin/*/helm"), key=lambda p: p.stat().st_mtime)
    assert found, f"no helm below {cache}/bin after hack/cluster build"
    return str(found[-1])


def template(program: str, *values: str) -> list[dict[str, Any]]:
    """The objects of the chart with these values."""
    sets = [word for value in values for word in ("--set", value)]
    text = subprocess.run(
        [program, "template", "rtj", str(CHART), "--namespace", "rtj-system", *sets],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    return [body for body in yaml.safe_load_all(text) if body]


def kinds(objects: list[dict[str, Any]]) -> set[str]:
    return {body["kind"] for body in objects}


def strangers(body: dict[str, Any]) -> list[str]:
    """Paths in an object that Kubernetes does not know, or that are of another type there; by its client's models.

    Kinds of other projects (PodMonitor, PrometheusRule) have no model and are not judged.
    """
    group, _, version = body["apiVersion"].rpartition("/")
    model = getattr(kubernetes.client, f"V{version[1:]}{body['kind']}", None)
    known = group == "" or group in ("apps", "policy") or group.endswith(".k8s.io")
    return _strangers(model.__name__, body, body["kind"]) if model and known else []


def _strangers(kind: str, value: Any, path: str) -> list[str]:
    if found := re.fullmatch(r"List\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        return [p for n, item in enumerate(value) for p in _strangers(found[1], item, f"{path}[{n}]")]
    if found := re.fullmatch(r"Dict\[str, (.*)\]", kind):
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is no map"]
        return [p for key, item in value.items() for p in _strangers(found[1], item, f"{path}.{key}")]
    model = getattr(kubernetes.client, kind, None)
    if model is None:
        wanted: dict[str, Any] = {
            "str": str,
            "bytes": str,  # base64
            "int": int,
            "bool": bool,
            "float": (int, float),
            "object": object,
        }
        return [] if isinstance(value, wanted[kind]) else [f"{path}: {value!r} is no {kind}"]
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no {kind}"]
    types = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
    unknown = [f"{path}.{name} is unknown" for name in value if name not in types]
    return unknown + [
        p
        for name, item in value.items()
        if name in types
        for p in _strangers(types[name], item, f"{path}.{name}")
    ]

"""The example's job for a cluster that one has: our patch of it, the container `ledger`, and patches of the user's own.

`kubectl kustomize` does the merging, so that a user's folder may hold what one knows from there: JSON patches (a list
of operations), merge patches (a mapping), or a whole component (a folder with a kustomization.yaml).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from hack.demo.own_settings import CONTROL_SUFFIX, CREDENTIALS, GPU, STORE_SECRET, OwnSettings
from hack.demo.settings import EXAMPLE, JOB, DemoError
from trainer_sidecar.contract.volume import ENV_STORE_ENDPOINT, ENV_STORE_REGION

COPIER = Path(__file__).with_name("ledger_copy.py")
COPIER_OBJECT = "rtj-demo-ledger"
LEDGER = "/ledger"
TRAINER = "/spec/template/spec/containers/0"
_TARGET = {"kind": "ResumableTrainingJob", "name": JOB}


def patch(settings: OwnSettings) -> list[dict[str, Any]]:
    """JSON patch of examples/pretrain/job.yaml."""
    return [
        _replace("/spec/checkpoint/intervalSteps", settings.interval_steps),
        _replace("/spec/checkpoint/store", job_store(settings)),
        *(_add(f"/spec/elastic/{name}", seconds) for name, seconds in _DELAYS.items()),
        *_ranks(settings),
        _replace(f"{TRAINER}/image", settings.trainer_image),
        _replace(f"{TRAINER}/args", ["--steps", str(settings.steps)]),
        _add(f"{TRAINER}/env", [_variable("OMP_NUM_THREADS", "1"), _variable("RTJ_LEDGER_DIR", LEDGER)]),
        _add(f"{TRAINER}/volumeMounts", [{"name": "ledger", "mountPath": LEDGER}]),
        _add("/spec/template/spec/initContainers", [ledger_container(settings)]),
        _add("/spec/template/spec/volumes", [
            {"name": "ledger", "emptyDir": {}},
            {"name": "ledger-copy", "configMap": {"name": COPIER_OBJECT}},
        ]),
    ]  # fmt: skip


_DELAYS = {"scaleDownDelaySeconds": 5, "scaleUpDelaySeconds": 3, "cooldownSeconds": 5}
"""That fit a demo of minutes."""


def job_store(settings: OwnSettings) -> dict[str, str]:
    """`spec.checkpoint.store`: everything is named, since the operator may be one with other defaults."""
    store = {"url": settings.store_url, "credentialsSecret": STORE_SECRET}
    named = {"endpoint": settings.endpoint, "region": settings.region}
    return store | {name: value for name, value in named.items() if value}


def ledger_container(settings: OwnSettings) -> dict[str, Any]:
    """A native sidecar: it starts before the ranks and ends after them, with all that they have logged."""
    reach = {ENV_STORE_ENDPOINT: settings.endpoint, ENV_STORE_REGION: settings.region}
    return {
        "name": "ledger",
        "image": settings.trainer_image,
        "restartPolicy": "Always",
        "command": ["python3", "/rtj-demo/ledger_copy.py", LEDGER, settings.store_url, "$(POD)"],
        "env": [
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            *(_variable(name, value) for name, value in reach.items() if value),
            *(_from_secret(name) for name in CREDENTIALS),
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "volumeMounts": [
            {"name": "ledger", "mountPath": LEDGER, "readOnly": True},
            {"name": "ledger-copy", "mountPath": "/rtj-demo", "readOnly": True},
        ],
    }


def copier_object(settings: OwnSettings) -> dict[str, Any]:
    """The ConfigMap with what the container `ledger` runs."""
    meta = {"name": COPIER_OBJECT, "namespace": settings.namespace}
    data = {COPIER.name: COPIER.read_text()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def write(settings: OwnSettings, folder: Path, *, control: bool) -> None:
    """A kustomization for the job in `folder`. Raises DemoError for a file of the user's that is no patch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.yaml").write_text(yaml.safe_dump(patch(settings), sort_keys=False))
    kustomization: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": settings.namespace,
        "resources": [os.path.relpath(EXAMPLE, folder)],
        "patches": [{"path": "demo.yaml", "target": _TARGET}],
    }
    if control:
        kustomization["nameSuffix"] = CONTROL_SUFFIX
    if settings.overlay_folder is not None:
        _add_overlay(settings.overlay_folder, folder, kustomization)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization, sort_keys=False))


def _add_overlay(source: Path, folder: Path, kustomization: dict[str, Any]) -> None:
    """The user's folder, copied: kustomize reads no files outside of its own."""
    if (source / "kustomization.yaml").exists():
        if (kind := _read(source / "kustomization.yaml").get("kind")) != "Component":
            raise DemoError(
                f"{source}/kustomization.yaml is of kind {kind}: only a Component goes on top of a job"
            )
        shutil.copytree(source, folder / "own", dirs_exist_ok=True)
        kustomization["components"] = ["own"]
        return
    files = sorted(path for path in source.iterdir() if path.suffix in (".yaml", ".yml", ".json"))
    if not files:
        raise DemoError(f"--overlay {source} holds no patch: put *.yaml or *.json there")
    for path in files:
        content = _read(path)
        if isinstance(content, dict):
            content = {"apiVersion": "resumabletraining.io/v1alpha1", "kind": _TARGET["kind"],
                       "metadata": {"name": JOB}, **content}  # fmt: skip
        target = f"own-{path.stem}.yaml"
        (folder / target).write_text(yaml.safe_dump(content, sort_keys=False))
        kustomization["patches"].append({"path": target, "target": _TARGET})


def _read(path: Path) -> Any:
    try:
        found = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise DemoError(f"{path} is no YAML: {error}") from error
    if not isinstance(found, dict | list):
        raise DemoError(
            f"{path}: a patch is a list of operations or a mapping, this is {type(found).__name__}"
        )
    return found


def _ranks(settings: OwnSettings) -> list[dict[str, Any]]:
    if settings.gpus:
        return [_replace(f"{TRAINER}/resources", {"limits": {GPU: settings.gpus}})]
    return [
        {"op": "remove", "path": f"{TRAINER}/resources"},
        _add("/spec/ranksPerNode", settings.ranks),
    ]


def _replace(path: str, value: Any) -> dict[str, Any]:
    return {"op": "replace", "path": path, "value": value}


def _add(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def _variable(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


def _from_secret(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "valueFrom": {"secretKeyRef": {"name": STORE_SECRET, "key": name, "optional": True}},
    }

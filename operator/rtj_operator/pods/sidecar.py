"""The sidecar's container: a native sidecar (init container that stays), the only one that sees store credentials."""

from collections.abc import Mapping
from typing import Any

from rtj_operator.api.base import JsonObject
from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.api.names import PLAN_VOLUME, SHARED_VOLUME, SIDECAR_CONTAINER
from rtj_operator.pods.settings import PodSettings
from trainer_sidecar.contract import volume as env
from trainer_sidecar.contract.fault_order import ENV_FAULT_ORDERS, FaultOrder, as_text

CREDENTIAL_KEYS = (
    ("AWS_ACCESS_KEY_ID", True),
    ("AWS_SECRET_ACCESS_KEY", True),
    ("AWS_SESSION_TOKEN", False),
)
"""(key of the Secret and name of the variable, whether a Secret that the job names must have it)."""


def build_sidecar(
    spec: EffectiveSpec,
    resources: Mapping[str, Any],
    settings: PodSettings,
    faults: tuple[FaultOrder, ...] = (),
) -> JsonObject:
    """The container `rtj-sidecar`."""
    container: JsonObject = {
        "name": SIDECAR_CONTAINER,
        "image": settings.sidecar_image,
        "restartPolicy": "Always",
        "env": _environment(spec, settings, faults),
        "ports": [{"name": "rtj-status", "containerPort": spec.status_port, "protocol": "TCP"}],
        # The trainer starts only when the launcher lies in the volume; a second is the kubelet's finest step.
        "startupProbe": _probe("/healthz", spec.status_port, failures=300),
        # One failure is enough: this is how a rank's death is pushed to the operator within a second (O4).
        "readinessProbe": _probe("/readyz", spec.status_port, failures=1),
        # Hung for two minutes: restarted alone. The trainer and what is sealed in the volume outlive it.
        "livenessProbe": _probe("/healthz", spec.status_port, failures=12, period=10, timeout=5),
        "resources": dict(resources),
        "securityContext": restricted(settings.sidecar_user),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts(settings),
    }
    if settings.sidecar_pull_policy:
        container["imagePullPolicy"] = settings.sidecar_pull_policy
    if settings.sidecar_command:
        container["command"] = list(settings.sidecar_command)
    return container


def mounts(settings: PodSettings) -> list[JsonObject]:
    """The shared volume and the plan, at the same paths in both containers."""
    return [
        {"name": SHARED_VOLUME, "mountPath": settings.volume_path},
        {"name": PLAN_VOLUME, "mountPath": settings.plan_path, "readOnly": True},
    ]


def restricted(user: int) -> JsonObject:
    """Security context that pod security "restricted" asks of every container (O25). The user is named, since a
    template may run its pods as root and the sidecar shall not."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsGroup": user,
        "runAsNonRoot": True,
        "runAsUser": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _environment(
    spec: EffectiveSpec, settings: PodSettings, faults: tuple[FaultOrder, ...]
) -> list[JsonObject]:
    values = {
        env.ENV_VOLUME: settings.volume_path,
        env.ENV_PLAN_FILE: settings.plan_file,
        env.ENV_STATUS_PORT: str(spec.status_port),
        ENV_FAULT_ORDERS: as_text(faults) if faults else None,
    }
    return [*_named(values), *store_environment(spec)]


def store_environment(spec: EffectiveSpec) -> list[JsonObject]:
    """What a process needs to reach the run's objects, credentials included: never for the trainer's container."""
    store = spec.store
    values = {
        env.ENV_NAMESPACE: spec.namespace,
        env.ENV_RUN_ID: spec.run_id,
        env.ENV_STORE_URL: store.url,
        env.ENV_STORE_ENDPOINT: store.endpoint,
        env.ENV_STORE_REGION: store.region,
    }
    pod_name = {"name": env.ENV_POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return [*_named(values), pod_name, *_credentials(store.secret, required=store.secret_required)]


def _named(values: Mapping[str, str | None]) -> list[JsonObject]:
    """Texts are literal: "$(" in a value would be expanded by the kubelet."""
    return [{"name": n, "value": v.replace("$", "$$")} for n, v in values.items() if v is not None]


def _credentials(secret: str, *, required: bool) -> list[JsonObject]:
    """Single keys, not the whole Secret: nothing else in it may become a variable of the sidecar."""
    return [
        {
            "name": key,
            "valueFrom": {
                "secretKeyRef": {"name": secret, "key": key, "optional": not (required and needed)}
            },
        }
        for key, needed in CREDENTIAL_KEYS
    ]


def _probe(path: str, port: int, *, failures: int, period: int = 1, timeout: int = 1) -> JsonObject:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "successThreshold": 1,
        "failureThreshold": failures,
    }

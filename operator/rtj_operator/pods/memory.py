"""Memory and CPU of the two containers once they share a memory volume (O24).

Pages of a memory volume are charged to the container that writes them: staged shards to the trainer, windows of a
restore to the sidecar. Beyond its own limit a container is killed, so both limits are raised by the volume's size.
The sidecar's requests equal its limits where the pod is Guaranteed without it, so that the pod keeps its QoS class.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from rtj_operator.api import Medium, Staging
from rtj_operator.api.base import JsonObject, dig
from rtj_operator.api.quantity import format_bytes, parse_quantity
from rtj_operator.pods.settings import PodSettings


def trainer_resources(container: JsonObject, staging: Staging) -> JsonObject | None:
    """The trainer's resources with its memory raised by the staging volume; None where it declares none."""
    resources = container.get("resources")
    size = _volume_bytes(staging)
    if not isinstance(resources, dict):
        return None
    if size is None or dig(resources, "limits", "memory") is None:
        return resources
    raised = dict(resources)
    for kind in ("limits", "requests"):
        old = dig(resources, kind, "memory")
        if old is not None:
            raised[kind] = {**resources[kind], "memory": format_bytes(parse_quantity(old) + size)}
    return raised


def sidecar_resources(
    template: Mapping[str, object], trainer: JsonObject, staging: Staging, settings: PodSettings
) -> JsonObject:
    """Requests and limits of the sidecar. Outside Guaranteed pods it may use idle CPU, and where nothing bounds the
    memory volume, nothing bounds the sidecar's memory either."""
    base = parse_quantity(settings.sidecar_memory)
    windows = _volume_bytes(staging)
    trainer_limit = dig(trainer, "resources", "limits", "memory")
    if windows is None and staging.medium is Medium.MEMORY and trainer_limit is not None:
        windows = parse_quantity(trainer_limit)
    bounded = staging.medium is Medium.DISK or windows is not None
    limit = format_bytes(base + (windows or Decimal(0)))
    if is_guaranteed(template):
        both = {"cpu": settings.sidecar_cpu_limit, "memory": limit}
        return {"requests": both, "limits": dict(both)}
    requests = {"cpu": settings.sidecar_cpu, "memory": format_bytes(base)}
    return {"requests": requests, **({"limits": {"memory": limit}} if bounded else {})}


def is_guaranteed(template: Mapping[str, object]) -> bool:
    """Whether the template's pod would be in QoS class Guaranteed by itself."""
    spec: Any = template.get("spec")
    every = [*(dig(spec, "containers") or []), *(dig(spec, "initContainers") or [])]
    return all(_same(c, kind) for c in every for kind in ("cpu", "memory"))


def _same(container: Mapping[str, object], kind: str) -> bool:
    limit = dig(container, "resources", "limits", kind)
    request = dig(container, "resources", "requests", kind)
    if limit is None:
        return False
    return request is None or parse_quantity(request) == parse_quantity(limit)


def _volume_bytes(staging: Staging) -> Decimal | None:
    """Bytes that the volume takes of memory, or None when it takes none or has no limit of its own."""
    if staging.medium is not Medium.MEMORY or staging.size is None:
        return None
    return parse_quantity(staging.size)

"""The Job of a drill that restores nothing: one pod of the sidecar's image reads all bytes."""

from collections.abc import Mapping

from rtj_operator.api.base import JsonObject, dig
from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.pods.settings import PodSettings
from rtj_operator.pods.sidecar import restricted, store_environment
from trainer_sidecar.contract.drill import ENV_CHECKPOINT

READER_CONTAINER = "rtj-reader"
TRIES = 3
"""Pods after the first, when the store cannot be read."""
_OF_THE_TEMPLATE = ("serviceAccountName", "imagePullSecrets", "tolerations")
"""What a pod may need to reach the store, and to be placed at all."""


def build_reader(
    metadata: JsonObject,
    spec: EffectiveSpec,
    template: Mapping[str, object],
    checkpoint_id: str,
    settings: PodSettings,
    seconds: int,
) -> JsonObject:
    """The Job that reads `checkpoint_id` of the run of `spec`, for `seconds` at most. `template`: the drilled job's."""
    memory = settings.sidecar_memory
    container: JsonObject = {
        "name": READER_CONTAINER,
        "image": settings.sidecar_image,
        "command": ["python3", "-m", "trainer_sidecar.sidecar.reader"],
        "env": [*store_environment(spec), {"name": ENV_CHECKPOINT, "value": checkpoint_id}],
        "resources": {
            "requests": {"cpu": settings.sidecar_cpu, "memory": memory},
            "limits": {"memory": memory},
        },
        "securityContext": restricted(settings.sidecar_user),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if settings.sidecar_pull_policy:
        container["imagePullPolicy"] = settings.sidecar_pull_policy
    kept = {name: value for name in _OF_THE_TEMPLATE if (value := dig(template, "spec", name))}
    pod = {**kept, "restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": TRIES,
            "activeDeadlineSeconds": seconds,
            "template": {"metadata": {"labels": metadata["labels"]}, "spec": pod},
        },
    }

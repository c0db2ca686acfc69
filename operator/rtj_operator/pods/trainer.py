"""The trainer's container: the user's own, with `rtj-launch` as PID 1 around its command and the shared volume
mounted."""

from pathlib import PurePosixPath

from rtj_operator.api import Staging
from rtj_operator.api.base import JsonObject
from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.api.names import SHM_VOLUME
from rtj_operator.pods.memory import trainer_resources
from rtj_operator.pods.settings import PodSettings
from rtj_operator.pods.sidecar import mounts
from trainer_sidecar.contract import volume as env

SHM_PATH = "/dev/shm"


def build_trainer(
    container: JsonObject, spec: EffectiveSpec, staging: Staging, startup_timeout: int, settings: PodSettings
) -> JsonObject:
    """The user's container with launcher, volumes, environment and raised memory; everything else of it is kept."""
    built = {**container}
    built.pop("args", None)
    built["command"] = launch_command(spec, settings)
    built["env"] = _environment(container, spec, startup_timeout, settings)
    built["volumeMounts"] = [*_list(container, "volumeMounts"), *mounts(settings), *_shm(container)]
    resources = trainer_resources(container, staging)
    if resources is not None:
        built["resources"] = resources
    return built


def launch_command(spec: EffectiveSpec, settings: PodSettings) -> list[str]:
    """`python3 <volume>/w/rtj-launch.pyz -- <what torchrun runs>`."""
    launcher = PurePosixPath(settings.volume_path) / "w" / "rtj-launch.pyz"
    return [settings.python, str(launcher), "--", *spec.command]


def has_shm(container: JsonObject) -> bool:
    """Whether the template mounts something at /dev/shm itself."""
    return any(str(m.get("mountPath", "")).rstrip("/") == SHM_PATH for m in _list(container, "volumeMounts"))


def _shm(container: JsonObject) -> list[JsonObject]:
    """A pod's own /dev/shm is 64 MiB, which breaks NCCL and DataLoader workers (O24)."""
    return [] if has_shm(container) else [{"name": SHM_VOLUME, "mountPath": SHM_PATH}]


def _environment(
    container: JsonObject, spec: EffectiveSpec, startup_timeout: int, settings: PodSettings
) -> list[JsonObject]:
    """Ours first, so that the user's may refer to it as $(RTJ_VOLUME); a name of ours cannot be set by the user."""
    socket = PurePosixPath(settings.volume_path) / "w" / "sidecar.sock"
    ours = {
        env.ENV_VOLUME: settings.volume_path,
        env.ENV_PLAN_FILE: settings.plan_file,
        env.ENV_SOCKET: str(socket),
        env.ENV_NAMESPACE: spec.namespace,
        env.ENV_RUN_ID: spec.run_id,
        "RTJ_STARTUP_TIMEOUT": str(startup_timeout),
    }
    theirs = [e for e in _list(container, "env") if e.get("name") not in ours]
    return [*({"name": n, "value": v} for n, v in ours.items()), *theirs]


def _list(container: JsonObject, field: str) -> list[JsonObject]:
    found = container.get(field)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []

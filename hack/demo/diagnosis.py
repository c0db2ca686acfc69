"""What a user would look at after a failure, collected while it is still there."""

from __future__ import annotations

from hack.demo.cluster import Kubectl
from hack.demo.console import Console
from hack.demo.place import Place
from hack.demo.settings import JOB, DemoError, Settings

TAIL = "--tail=2000"
OPERATOR_LABEL = "app.kubernetes.io/name=rtj-operator"


def collect(place: Place, settings: Settings, console: Console) -> None:
    """Describe the job, its pods and nodes, and keep the logs. Every failing command is written down in its file."""
    folder, cluster = settings.diagnosis, place.cluster
    folder.mkdir(parents=True, exist_ok=True)
    namespace = ("-n", settings.namespace)
    operator = ("-n", place.operator_namespace, "-l", OPERATOR_LABEL, TAIL, "--prefix")
    looks = {
        "job.txt": ("describe", "resumabletrainingjob", JOB, *namespace),
        "job.yaml": ("get", "resumabletrainingjob", JOB, *namespace, "-o", "yaml"),
        "objects.txt": ("get", "jobs,pods", *namespace, "-o", "wide"),
        "pods.txt": ("describe", "pods", *namespace),
        "events.txt": ("get", "events", *namespace, "--sort-by=.lastTimestamp"),
        "nodes.txt": ("describe", "nodes"),
        "operator.log": ("logs", *operator),
    }
    for name, words in looks.items():
        (folder / name).write_text(_output(cluster, *words))
    for pod in _output(cluster, "get", "pods", *namespace, "-o", "name").split():
        for container in ("trainer", "rtj-sidecar"):
            text = _output(cluster, "logs", pod, "-c", container, *namespace, TAIL)
            (folder / f"{pod.removeprefix('pod/')}-{container}.log").write_text(text)
    console.complain(_excerpt((folder / "job.txt").read_text(), "Status:", 4000))
    console.complain((folder / "operator.log").read_text()[-3000:])
    console.complain(f"more in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def _output(cluster: Kubectl, *words: str) -> str:
    try:
        return cluster.kubectl(*words, timeout=20)
    except DemoError as error:
        return f"{error}\n"


def _excerpt(text: str, start: str, size: int) -> str:
    return text[max(0, text.find(start)) :][:size]

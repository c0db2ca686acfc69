"""What hack/cluster makes of Kueue's own manifests, and that a Kueue that is asked for changes nothing of the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

TOOL = Path(__file__).parents[2] / "hack" / "cluster"
sys.path[:0] = [str(TOOL)]

from localcluster import binaries, kueue, settings  # noqa: E402


def at(tmp_path: Path) -> settings.Settings:
    found = settings.from_environment(
        {"RTJ_CLUSTER_DIR": str(tmp_path / "state"), "RTJ_CACHE": str(tmp_path / "cache")}
    )
    found.pki.mkdir(parents=True)
    (found.pki / "ca.crt").write_text("certificate")
    return found


def webhook(name: str, group: str, path: str) -> dict[str, Any]:
    service = {"name": "webhook-service", "namespace": "system", "path": path}
    return {"name": name, "clientConfig": {"service": service}, "rules": [{"apiGroups": [group]}]}


def test_webhooks_stand_at_an_address_that_the_api_server_has_and_ask_for_queued_jobs_only(
    tmp_path: Path,
) -> None:
    found = kueue._at_address(
        at(tmp_path),
        {
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": "mutating-webhook-configuration", "creationTimestamp": None},
            "webhooks": [
                webhook("mjob.kb.io", "batch", "/mutate-batch-v1-job"),
                webhook("mpod.kb.io", "", "/mutate--v1-pod"),
                webhook("mray.kb.io", "ray.io", "/mutate-ray"),
                webhook("mworkload.kb.io", "kueue.x-k8s.io", "/mutate-workload"),
            ],
        },
    )
    assert found["metadata"] == {"name": "kueue-mutating-webhook-configuration", "labels": {"app": "kueue"}}
    job, workload = found["webhooks"]
    assert (job["name"], workload["name"]) == ("mjob.kb.io", "mworkload.kb.io")
    assert job["clientConfig"] == {
        "url": "https://172.31.77.1:9443/mutate-batch-v1-job",
        "caBundle": "Y2VydGlmaWNhdGU=",
    }
    assert job["objectSelector"] == {
        "matchExpressions": [{"key": "kueue.x-k8s.io/queue-name", "operator": "Exists"}]
    }
    assert "objectSelector" not in workload


def test_objects_that_kubectl_prints_one_after_the_other_are_all_read() -> None:
    text = '{"kind": "A"}\n{"kind": "List", "items": [{"kind": "B"}, {"kind": "C"}]}\n'
    assert [found["kind"] for found in kueue._objects(text)] == ["A", "B", "C"]


def test_kueue_is_no_part_of_what_a_cluster_needs(tmp_path: Path) -> None:
    """Another version of it must not make anybody build Kubernetes again."""
    assert kueue.NAME not in {program.name for program in binaries.PROGRAMS}
    assert kueue.folder(at(tmp_path)).parent == tmp_path / "cache" / "bin"
    assert kueue.folder(settings.from_environment({})).name not in binaries.key()

"""A right that the operator lacks is named where users look, and everything that does not need it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import KEY, Cluster, assert_one_of_everything, job_object, run_until_planned
from fake_kube import FakeKube
from operator_values import end_report, sidecar

from rtj_operator import fencing
from rtj_operator.api import parse_job
from rtj_operator.api.job import owner_reference
from rtj_operator.api.names import FINALIZER, LABEL_PLACEMENT
from rtj_operator.fencing import Stores
from rtj_operator.kube import EVENTS, PODS, RTJ, Forbidden, Kind, KubeError
from rtj_operator.main import _crd_lists, parse
from rtj_operator.observe import Graves
from rtj_operator.reconcile import TryLater
from rtj_operator.remembered import Entry, Memory
from rtj_operator.rights import missing_right
from rtj_operator.sweep import sweep
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.store.base import AccessDeniedError, UnavailableError
from trainer_sidecar.store.verify import FormatTooNewError

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "jobs": "batch",
    "events": "events.k8s.io",
    "pods": "",
    "secrets": "",
    "resumabletrainingjobs": RTJ.group,
}


def deny(cluster: Cluster, verb: str, resource: str) -> None:
    cluster.kube.denied[verb, resource] = GROUPS[resource.partition("/")[0]]


def shown(cluster: Cluster) -> str:
    """Conditions that are not as they should be, and events."""
    raw = cluster.kube.objects[RTJ.plural, "ns", "sft"]
    conditions = (raw.get("status") or {}).get("conditions", [])
    told = [
        f"{c['reason']}: {c['message']}"
        for c in conditions
        if (c["type"], c["status"]) == ("Degraded", "True")
    ]
    notes = [b["note"] for (plural, _, _), b in cluster.kube.objects.items() if plural == EVENTS.plural]
    return "\n".join((*told, *notes))


def until_it_is_in_the_way(step: Callable[[], None]) -> None:
    for _ in range(8):
        try:
            step()
        except TryLater:
            return
    pytest.fail("nothing needed that right")


@pytest.mark.parametrize(
    ("verb", "resource", "named"),
    [
        ("create", "jobs", "grant create on jobs.batch in namespace ns"),
        ("patch", "pods", "grant patch on pods in namespace ns"),
        ("list", "pods", "grant list on pods in namespace ns"),
        ("list", "jobs", "grant list on jobs.batch in namespace ns"),
    ],
)
def test_a_right_that_the_job_needs_is_in_its_condition_and_event_until_it_is_granted(
    tmp_path: Path, verb: str, resource: str, named: str
) -> None:
    cluster = Cluster(tmp_path / "store")
    operator = cluster.operator()
    deny(cluster, verb, resource)
    until_it_is_in_the_way(lambda: cluster.step(operator))
    text = shown(cluster)
    assert f"RightMissing: the operator lacks a right: {named} (the chart's roles have it)" in text
    assert text.count(named) == 2, "once in the condition, once as an event"
    writes = len(cluster.kube.log)
    for _ in range(3):
        until_it_is_in_the_way(lambda: cluster.step(operator))
    assert len(cluster.kube.log) == writes, "a retry that fails alike writes nothing"
    cluster.kube.denied.clear()
    run_until_planned(cluster, operator)
    assert_one_of_everything(cluster)
    assert "RightMissing" not in str(cluster.status()["conditions"])


def leftover_pod(cluster: Cluster) -> None:
    """A pod of an older placement still stands, and the job trains."""
    pod = copy.deepcopy(cluster.kube.objects[PODS.plural, "ns", "sft-p1-0"])
    pod["metadata"] |= {"name": "sft-p0-0", "uid": "old", "annotations": {}}
    pod["metadata"]["labels"][LABEL_PLACEMENT] = "0"
    cluster.kube.put(PODS, pod)


def lost_pod(cluster: Cluster) -> None:
    """A pod is deleted by hand, and none comes up for the next placement."""
    del cluster.kube.objects[PODS.plural, "ns", "sft-p1-0"]
    cluster.pods_come_up = lambda: None  # type: ignore[method-assign]


def edited(**spec: Any) -> Callable[[Cluster], None]:
    def edit(cluster: Cluster) -> None:
        raw = cluster.kube.objects[RTJ.plural, "ns", "sft"]
        raw["spec"].update(spec)
        raw["metadata"]["generation"] += 1
        cluster.kube.put(RTJ, raw)

    return edit


def ranks_refuse(cluster: Cluster) -> None:
    refused = end_report(OutcomeKind.RESUME_REFUSED, epoch=1)
    cluster.answers.update({i: refused.model_copy(update={"pod_index": i}) for i in (0, 1)})


def deleted(cluster: Cluster) -> None:
    raw = cluster.kube.objects[RTJ.plural, "ns", "sft"]
    raw["spec"]["deletionPolicy"] = "Delete"
    raw["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER]}
    cluster.kube.put(RTJ, raw)


@pytest.mark.parametrize(
    ("happens", "verb", "resource", "phase"),
    [
        (leftover_pod, "delete", "pods", "Running"),
        (lost_pod, "delete", "pods", "Pending"),
        (lost_pod, "delete", "jobs", "Pending"),
        (edited(suspend=True), "patch", "pods", "Saving"),
        (edited(deletionPolicy="Delete"), "patch", "resumabletrainingjobs", "Running"),
        (deleted, "delete", "pods", "Deleting"),
        (ranks_refuse, "delete", "jobs", "Failed"),
    ],
)
def test_an_action_that_is_refused_again_and_again_is_written_once(
    tmp_path: Path, happens: Callable[[Cluster], None], verb: str, resource: str, phase: str
) -> None:
    """Each write comes back as an event and asks for another look: two that contradict each other would never end."""
    cluster = Cluster(tmp_path / "store")
    cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
    operator = cluster.operator()
    run_until_planned(cluster, operator)
    assert cluster.status()["phase"] == "Running"
    deny(cluster, verb, resource)
    if phase == "Failed":
        leftover_pod(cluster)
        deny(cluster, "delete", "pods")
    happens(cluster)
    operator.memory.stale(KEY)
    for _ in range(4):
        with contextlib.suppress(TryLater):
            cluster.step(operator)
    assert f"grant {verb} on {resource}" in shown(cluster) or phase == "Failed"
    assert "RightMissing" in shown(cluster)
    writes = len(cluster.kube.log)
    for _ in range(3):
        until_it_is_in_the_way(lambda: cluster.step(operator))
    assert cluster.kube.log[writes:] == []
    assert cluster.status()["phase"] == phase
    if phase == "Failed":
        assert cluster.status()["reason"] == "ResumeRefused", "why it failed is not lost over it"
    cluster.kube.denied.clear()
    for _ in range(4):
        with contextlib.suppress(TryLater):
            cluster.step(operator)
    raw = cluster.kube.objects[RTJ.plural, "ns", "sft"]
    let_go = phase == "Deleting" and raw["metadata"]["finalizers"] == []
    assert let_go or "RightMissing" not in str(raw["status"])


def test_what_happens_meanwhile_is_told_though_an_action_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "store")
    cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
    operator = cluster.operator()
    run_until_planned(cluster, operator)
    deny(cluster, "delete", "pods")
    lost_pod(cluster)
    operator.memory.stale(KEY)
    until_it_is_in_the_way(lambda: cluster.step(operator))
    reasons = [b["reason"] for (plural, _, _), b in cluster.kube.objects.items() if plural == EVENTS.plural]
    assert "AttemptEnded" in reasons


def test_pods_that_a_webhook_refuses_to_have_changed_are_said_once(tmp_path: Path) -> None:
    class Hooked(FakeKube):
        hooked = False

        async def patch(self, kind: Kind, namespace: str, name: str, body: Any, **kwargs: Any) -> Any:
            if self.hooked and kind is PODS:
                sentence = f'admission webhook "policy" denied the request: {name} may not be changed'
                raise Forbidden(f"PATCH: 403: {sentence}", status=403, sentence=sentence)
            return await super().patch(kind, namespace, name, body, **kwargs)

    cluster = Cluster(tmp_path / "store")
    hooked, objects = Hooked(), cluster.kube.objects
    hooked.objects, cluster.kube = objects, hooked
    cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
    operator = cluster.operator()
    run_until_planned(cluster, operator)
    del objects[PODS.plural, "ns", "sft-p1-1"]["metadata"]["annotations"]
    hooked.hooked = True
    operator.memory.stale(KEY)
    until_it_is_in_the_way(lambda: cluster.step(operator))
    assert 'PodRefused: PATCH: 403: admission webhook "policy"' in shown(cluster)
    assert cluster.status()["reason"] == "RanksTraining"
    writes = len(hooked.log)
    for _ in range(3):
        until_it_is_in_the_way(lambda: cluster.step(operator))
    assert hooked.log[writes:] == []


def test_a_store_written_by_a_later_version_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def too_new(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise FormatTooNewError("manifest of 000000000009-0000000003-0123abcd has schema 9: upgrade")

    cluster = Cluster(tmp_path / "store")
    operator = cluster.operator()
    monkeypatch.setattr(fencing, "fence_and_pick", too_new)
    until_it_is_in_the_way(lambda: cluster.step(operator))
    assert "SchemaMismatch" in shown(cluster)
    writes = len(cluster.kube.log)
    for _ in range(3):
        until_it_is_in_the_way(lambda: cluster.step(operator))
    assert cluster.kube.log[writes:] == []
    assert len(tries) == 4
    monkeypatch.undo()
    run_until_planned(cluster, operator)
    assert_one_of_everything(cluster)
    assert "SchemaMismatch" not in str(cluster.status())


def test_trouble_that_reads_otherwise_each_time_comes_back_as_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores put request numbers and times into their errors: the write of each must not void the growing wait."""
    requests = itertools.count(1)

    def away(*_: Any, **__: Any) -> Any:
        raise UnavailableError(f"PUT: 503 SlowDown (request {next(requests)})")

    cluster = Cluster(tmp_path / "store")
    operator = cluster.operator()
    monkeypatch.setattr(fencing, "fence_and_pick", away)
    for number in (1, 2, 3):
        until_it_is_in_the_way(lambda: cluster.step(operator))
        raw = cluster.kube.objects[RTJ.plural, "ns", "sft"]
        assert f"(request {number})" in raw["status"]["message"]
        assert not operator.memory.changed(KEY, raw)
        cluster.kube.put(RTJ, raw)
        assert operator.memory.changed(KEY, raw), "what somebody else writes is news"


def test_the_finalizer_needs_a_right_that_is_named_before_anything_is_placed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "store")
    cluster.kube.objects[RTJ.plural, "ns", "sft"]["spec"]["deletionPolicy"] = "Delete"
    deny(cluster, "patch", "resumabletrainingjobs")
    until_it_is_in_the_way(lambda: cluster.step(cluster.operator()))
    assert "grant patch on resumabletrainingjobs.resumabletraining.io in namespace ns" in shown(cluster)


def test_a_job_that_runs_is_looked_after_though_its_finalizer_cannot_be_set(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "store")
    operator = cluster.operator()
    cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
    run_until_planned(cluster, operator)
    cluster.kube.objects[RTJ.plural, "ns", "sft"]["spec"]["deletionPolicy"] = "Delete"
    cluster.kube.put(RTJ, cluster.kube.objects[RTJ.plural, "ns", "sft"])
    operator.memory.stale(KEY)
    deny(cluster, "patch", "resumabletrainingjobs")
    until_it_is_in_the_way(lambda: cluster.step(operator))
    assert "grant patch on resumabletrainingjobs" in shown(cluster)
    writes = len(cluster.kube.log)
    until_it_is_in_the_way(lambda: cluster.step(operator))
    assert len(cluster.kube.log) == writes
    failed = end_report(OutcomeKind.FAILED, epoch=1)
    cluster.answers.update({i: failed.model_copy(update={"pod_index": i}) for i in (0, 1)})
    for _ in range(4):
        with contextlib.suppress(TryLater):
            cluster.step(operator)
    assert [a.attempt for a in cluster.history().attempts] == [1, 2]


@pytest.mark.parametrize(("verb", "resource"), [("create", "events"), ("get", "secrets")])
def test_without_events_or_secrets_a_job_runs_all_the_same(
    tmp_path: Path, verb: str, resource: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path / "store")
    deny(cluster, verb, resource)
    with caplog.at_level(logging.DEBUG):
        run_until_planned(cluster, cluster.operator())
    assert_one_of_everything(cluster)
    assert f'cannot {verb} resource "{resource}"' in caplog.text


def test_a_store_that_refuses_the_operators_own_identity_says_why_no_secret_was_used(
    tmp_path: Path,
) -> None:
    class Denies(Stores):
        def get(self, spec: Any, credentials: Any) -> Any:
            assert not credentials
            raise AccessDeniedError("s3://bucket/team: bucket: no usable credentials")

    cluster = Cluster(tmp_path / "store")
    cluster.stores = Denies()  # type: ignore[assignment]
    deny(cluster, "get", "secrets")
    until_it_is_in_the_way(lambda: cluster.step(cluster.operator()))
    assert (
        "the operator's own credentials were used: the operator lacks a right: grant get on secrets"
        in shown(cluster)
    )
    cluster.kube.denied.clear()
    until_it_is_in_the_way(lambda: cluster.step(cluster.operator()))
    assert "the operator's own credentials were used: there is no Secret ns/rtj-store" in shown(cluster)


def test_a_status_that_may_not_be_written_is_told_by_an_event_and_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path / "store")
    deny(cluster, "patch", "resumabletrainingjobs/status")
    until_it_is_in_the_way(lambda: cluster.step(cluster.operator()))
    named = "grant patch on resumabletrainingjobs/status.resumabletraining.io in namespace ns"
    assert named in shown(cluster)
    assert named in caplog.text
    assert [v for v, kind, _ in cluster.kube.log if kind != EVENTS.plural] == [], "no intent, no effect (R10)"


@pytest.mark.parametrize(
    ("status", "sentence", "right"),
    [
        (401, "Unauthorized", "renew it: Unauthorized"),
        (403, 'pods "x" is forbidden: exceeded quota: team', ""),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', ""),
        (
            403,
            'nodes is forbidden: User "u" cannot list resource "nodes" in API group "" at the cluster scope',
            "grant list on nodes for the whole cluster",
        ),
    ],
)
def test_rights_are_told_from_what_admission_refuses(status: int, sentence: str, right: str) -> None:
    found = missing_right(Forbidden("GET: 403", status=status, sentence=sentence))
    assert right in found
    assert bool(found) == bool(right)
    assert isinstance(Forbidden("x"), KubeError)


def test_a_namespace_without_the_role_is_named_and_the_others_are_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Role-only: `--namespaces closed,ns`, and nobody has bound the Role in the first."""
    cluster = Cluster(tmp_path / "store")
    memory, graves = Memory(), Graves()
    memory.remember(("closed", "before"), Entry({}))
    cluster.kube.closed.add("closed")
    asyncio.run(_crd_lists(cluster.kube, ("closed", "ns"), pause=0))
    due = asyncio.run(sweep(cluster.kube, ("closed", "ns"), memory, graves))
    assert due == [KEY]
    assert caplog.text.count("in namespace closed (the chart's roles have it)") == 2
    assert memory.keys_in({"closed"}) == [("closed", "before")], "not taken for gone"
    for alone in (("closed",), ("closed", "closed-too")):
        cluster.kube.closed.add("closed-too")
        with pytest.raises(Forbidden):
            asyncio.run(sweep(cluster.kube, alone, memory, graves))


RTJS, CORE = RTJ.group, ""
IN_NAMESPACES = {
    *((RTJS, "resumabletrainingjobs", v) for v in ("get", "list", "watch", "create", "patch", "delete")),
    *((RTJS, "resumedrills", v) for v in ("list", "watch", "create", "delete")),
    *((RTJS, f"{kind}/status", "patch") for kind in ("resumabletrainingjobs", "resumedrills")),
    *((RTJS, f"{kind}/finalizers", "update") for kind in ("resumabletrainingjobs", "resumedrills")),
    *(("batch", "jobs", v) for v in ("get", "list", "watch", "create", "delete")),
    *((CORE, "pods", v) for v in ("list", "watch", "create", "patch", "delete")),
    (CORE, "events", "list"),
    ("events.k8s.io", "events", "create"),
    ("kueue.x-k8s.io", "workloads", "list"),
    (CORE, "secrets", "get"),
    (CORE, "namespaces", "get"),
}
"""Each is used: watches are kopf's, `finalizers` is what `blockOwnerDeletion` in a Job's owner reference asks for.
Of jobs, only the sandboxes of drills are created; drills by the schedules of jobs.
Namespaces only with faultInjection.enabled."""
OUTSIDE = {(CORE, "nodes", "get"), (CORE, "nodes", "list"), (CORE, "pods", "list")}


def granted(rules: str) -> set[tuple[str, str, str]]:
    text = (ROOT / "charts" / "rtj-operator" / "templates" / "_names.tpl").read_text()
    found = text.partition(f'define "{rules}" -}}}}')[2].partition("{{- end -}}")[0]
    plain = "\n".join(line for line in found.splitlines() if "{{" not in line or "resourceNames" in line)
    parsed = yaml.safe_load(plain.replace('{{ include "rtj.secrets" . }}', "[]"))
    return {
        (g, r, v)
        for rule in parsed
        for g in rule["apiGroups"]
        for r in rule["resources"]
        for v in rule["verbs"]
    }


def test_the_charts_rules_are_the_rights_that_the_operator_uses_and_no_more() -> None:
    assert granted("rtj.jobRules") == IN_NAMESPACES
    assert granted("rtj.clusterRules") == OUTSIDE
    job = parse_job(job_object())
    assert owner_reference(job)["blockOwnerDeletion"] is True


def test_the_chart_sets_every_flag_of_the_operator_but_those_for_development() -> None:
    text = (ROOT / "charts" / "rtj-operator" / "templates" / "deployment.yaml").read_text()
    flags = {f"RTJ_OPERATOR_{name.upper()}" for name in vars(parse([]))}
    unset = {name for name in flags if f"{{name: {name}," not in text}
    development = {"KUBECONFIG", "SIDECAR_COMMAND", "SIDECAR_USER", "WORKERS"}
    assert unset == {f"RTJ_OPERATOR_{name}" for name in development}

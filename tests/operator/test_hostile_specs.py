"""What a spec may hold and must not reach: other prefixes, our labels, the sidecar's credentials, a token, a shell."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from fake_cluster import job_object

from rtj_operator.api import InvalidJobError, ResumableTrainingJob, parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.api.names import LABEL_JOB, LABEL_PLACEMENT, LABEL_UID, SIDECAR_CONTAINER
from rtj_operator.api.validation import validate
from rtj_operator.kube import RTJ
from rtj_operator.pods import Placement, PodSettings, build_job
from trainer_sidecar.contract.keys import RunKeys


def job_with(**spec: Any) -> ResumableTrainingJob:
    raw = copy.deepcopy(job_object())
    raw["spec"].update(spec)
    return parse_job(raw)


def built(job: ResumableTrainingJob) -> dict[str, Any]:
    settings = PodSettings(sidecar_image="sidecar")
    made = build_job(job, effective(job, OperatorDefaults()), Placement(1, 2), settings)
    return dict(made["spec"]["template"])


def template(**pod: Any) -> dict[str, Any]:
    trainer = {"name": "trainer", "image": "x", "command": ["train.py"]}
    return {"spec": {"containers": [trainer], **pod}}


def reasons(job: ResumableTrainingJob, **defaults: Any) -> list[str]:
    return [p.reason.value for p in validate(job, OperatorDefaults(**defaults))]


@pytest.mark.parametrize("url", ["s3://ckpt/team-a/../team-b", "s3://ckpt/team-a/./x", "s3://ckpt/.."])
def test_a_url_cannot_climb_out_of_its_prefix(url: str) -> None:
    job = job_with(checkpoint={"store": {"url": url}})
    assert "StoreNotAllowed" in reasons(job, allowed_url_prefixes=("s3://ckpt/team-a",))
    assert "StoreNotAllowed" in reasons(job)


@pytest.mark.parametrize("url", ["s3://ckpt/team-another", "s3://ckpt", "s3://ckpt-team-a/x"])
def test_a_prefix_is_a_folder_and_not_the_beginning_of_a_name(url: str) -> None:
    job = job_with(checkpoint={"store": {"url": url}})
    assert "StoreNotAllowed" in reasons(job, allowed_url_prefixes=("s3://ckpt/team-a",))


@pytest.mark.parametrize(
    "run_id", ["..", "../other", "a/b", "a b", "", "a\nb", "\u202egnp", "x" * 129, "a\x00"]
)
def test_a_run_id_cannot_name_another_place_in_the_store(run_id: str) -> None:
    with pytest.raises(InvalidJobError, match="runId"):
        job_with(checkpoint={"store": {"url": "s3://b/p"}, "runId": run_id})


def test_every_key_of_a_run_lies_below_its_own_prefix() -> None:
    keys = RunKeys("ns", "sft")
    assert keys.prefix.rstrip("/") == "ns/sft"
    assert keys.journal(1).startswith("ns/sft/")


def test_a_template_cannot_take_our_labels_and_so_another_jobs_pods() -> None:
    labels = {LABEL_UID: "uid-of-another", LABEL_JOB: "other", LABEL_PLACEMENT: "99", "team": "a"}
    job = job_with(template={"metadata": {"labels": labels}, **template()})
    found = built(job)["metadata"]["labels"]
    assert (found[LABEL_UID], found[LABEL_JOB], found[LABEL_PLACEMENT]) == ("uid-job", "sft", "1")
    assert found["team"] == "a"


def test_the_trainer_sees_neither_the_stores_credentials_nor_a_token() -> None:
    pod = built(job_with())["spec"]
    (trainer,) = pod["containers"]
    sidecar = next(c for c in pod["initContainers"] if c["name"] == SIDECAR_CONTAINER)
    assert "AWS_SECRET_ACCESS_KEY" in json.dumps(sidecar)
    assert "AWS_" not in json.dumps(trainer)
    assert "rtj-store" not in json.dumps([trainer, pod["volumes"]])
    assert pod["automountServiceAccountToken"] is False
    assert "shareProcessNamespace" not in pod


@pytest.mark.parametrize("field", ["shareProcessNamespace", "hostPID"])
def test_what_would_show_the_sidecars_environment_to_the_trainer_is_refused(field: str) -> None:
    assert "SharedProcessNamespace" in reasons(job_with(template=template(**{field: True})))


def test_no_container_of_the_template_can_stand_in_for_the_sidecar() -> None:
    fake = {"name": SIDECAR_CONTAINER, "image": "evil"}
    assert "ReservedName" in reasons(job_with(template=template(initContainers=[fake])))


@pytest.mark.parametrize(
    "text", ["$(AWS_SECRET_ACCESS_KEY)", "a; rm -rf /", "\u202e\U0001f525\n\t'\"`", "x" * 100_000]
)
def test_the_users_words_are_words_of_the_trainer_and_of_nobody_else(text: str) -> None:
    words = template()
    words["spec"]["containers"][0]["command"] = ["train.py", text]
    pod = built(job_with(template=words))["spec"]
    (trainer,) = pod["containers"]
    assert trainer["command"][-2:] == ["train.py", text], "one argument, never a line for a shell"
    sidecar = next(c for c in pod["initContainers"] if c["name"] == SIDECAR_CONTAINER)
    assert text not in json.dumps(sidecar, ensure_ascii=False)


def test_the_operator_never_writes_to_a_path_made_from_a_name_that_was_not_quoted() -> None:
    path = RTJ.path("ns/../other", "a/b?x=1#y")
    assert path.endswith("/namespaces/ns%2F..%2Fother/resumabletrainingjobs/a%2Fb%3Fx%3D1%23y")

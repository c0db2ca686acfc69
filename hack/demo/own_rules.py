"""What the API server and the operator would refuse later, when there is a namespace and an operator already: told from
the settings alone, before anything is made. The rules of the job's fields are read from its schema, not written anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from hack.demo.own_settings import OwnSettings
from hack.demo.settings import DemoError
from rtj_operator.api import InvalidJobError, parse_job
from rtj_operator.api.checkpoint import Store
from rtj_operator.api.effective import OperatorDefaults
from rtj_operator.api.validation import validate
from rtj_operator.conditions import Reason

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_IMAGE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._/-]*(:[0-9]+/[A-Za-z0-9._/-]+)?(:[\w.-]+)?(@[a-z0-9]+:[0-9a-f]+)?"
)
_ENDPOINT_HERE = re.compile(r"https?://[^ ?#@]+")


def wrong_namespace(name: str) -> str:
    """What is wrong with the name of a namespace; empty: nothing."""
    if _NAMESPACE.fullmatch(name):
        return ""
    return f"--namespace {name}: at most 63 of a-z, 0-9 and -, with no - at either end"


def wrong(settings: OwnSettings) -> Iterator[str]:
    """What is wrong with the settings of a demo, each with its option."""
    schema = Store.model_json_schema(by_alias=True)["properties"]
    if said := _refused(schema["url"], settings.store_url):
        yield f"--store {settings.store}: with the demo's own prefix {settings.store_url}: {said}"
    if settings.endpoint and (said := _refused(schema["endpoint"], settings.endpoint)):
        yield f"--endpoint {settings.endpoint}: {said}"
    if settings.endpoint_here and not _ENDPOINT_HERE.fullmatch(settings.endpoint_here):
        yield f"--endpoint-here {settings.endpoint_here}: must be http(s)://host[:port]"
    if settings.region and (said := _refused(schema["region"], settings.region)):
        yield f"--region {settings.region}: {said}"
    images = {
        "--operator-image": settings.operator_image,
        "--sidecar-image": settings.sidecar_image,
        "--trainer-image": settings.trainer_image,
    }
    for option, image in images.items():
        if image and not _IMAGE.fullmatch(image):
            yield f"{option} {image}: is no name of an image (registry.example.com/team/name:tag)"


def _refused(field: dict[str, Any], value: str) -> str:
    """By a field of the job's schema: its length, its pattern, its rules over the value alone."""
    for kind in field.get("anyOf", [field]):
        if kind.get("type") != "string":
            continue
        if len(value) > kind.get("maxLength", len(value)):
            return f"has {len(value)} characters, at most {kind['maxLength']}"
        if "pattern" in kind and not re.fullmatch(kind["pattern"], value):
            return f"does not match {kind['pattern']}"
    for rule in field.get("x-kubernetes-validations", []):
        matches = re.fullmatch(r"self\.matches\('(.*)'\)", rule["rule"])
        if matches and not re.fullmatch(matches[1], value):
            return str(rule["message"])
    return ""


def check_job(text: str) -> None:
    """Raises DemoError for a job, as kustomize has built it with the user's patches, that would be refused."""
    jobs = [found for found in yaml.safe_load_all(text) if found and found["kind"] == "ResumableTrainingJob"]
    if len(jobs) != 1:
        raise DemoError(f"with the patches of --overlay there are {len(jobs)} jobs instead of one")
    (job,) = jobs
    try:
        problems = validate(
            parse_job({**job, "metadata": {"uid": "none-yet", **job["metadata"]}}), OperatorDefaults()
        )
    except InvalidJobError as error:
        raise DemoError(f"job {job['metadata']['name']} with the patches of --overlay: {error}") from error
    # Which Secrets are allowed, only the operator that is there can tell.
    if said := [problem.sentence for problem in problems if problem.reason != Reason.SECRET_NOT_ALLOWED]:
        told = "; ".join(said)
        raise DemoError(f"job {job['metadata']['name']} would be refused: {told}: see --overlay and --gpus")

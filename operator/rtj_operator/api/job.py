"""The resource as a whole, and reading one from the API server's JSON."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from rtj_operator.api.base import ApiModel, JsonObject, Timestamp, cel, rules
from rtj_operator.api.names import API_VERSION_FULL, KIND, MAX_NAME_LENGTH
from rtj_operator.api.spec import JobSpec
from rtj_operator.api.status import JobStatus

M = TypeVar("M", bound=ApiModel)


NAME_RULE = cel(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    "metadata.name must start with a letter and hold only lower-case letters, digits and '-'",
)
"""Of every kind of this API group: names of pods and Jobs are made from an object's."""


class InvalidJobError(ValueError):
    """An object that does not fit the schema: it was stored under another version of it. The message names each
    field."""


class ObjectMeta(ApiModel):
    """The parts of metav1.ObjectMeta that we read."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    finalizers: list[str] = Field(default_factory=list)
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None


class ResumableTrainingJob(ApiModel):
    """A distributed training job that goes on from its newest committed checkpoint, whatever stops it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
                f"metadata.name must not be longer than {MAX_NAME_LENGTH} characters: pod names are made from it",
            ),
            NAME_RULE,
        )
    )

    api_version: str = API_VERSION_FULL
    kind: str = KIND
    metadata: ObjectMeta
    spec: JobSpec
    """What to train, on how many nodes, and how it survives."""
    status: JobStatus = JobStatus()
    """What the operator has seen, meant and done."""


def parse_job(raw: Mapping[str, object]) -> ResumableTrainingJob:
    """The object in the API server's JSON. Raises InvalidJobError naming every field that does not fit."""
    return parse_object(ResumableTrainingJob, raw)


def parse_object(model: type[M], raw: Mapping[str, object]) -> M:
    """The same for any kind of this API group."""
    try:
        return model.model_validate(raw)
    except ValidationError as exc:
        named = "; ".join(f"{path_of(e['loc'])}: {e['msg']}" for e in exc.errors(include_url=False))
        raise InvalidJobError(f"the object does not fit schema {API_VERSION_FULL}: {named}") from exc


def path_of(loc: tuple[int | str, ...]) -> str:
    """The field that a finding of pydantic's is about, as people write it: spec.elastic.sizes[0]."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")


class Owning(Protocol):
    """An object that others belong to."""

    @property
    def api_version(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def metadata(self) -> ObjectMeta: ...


def owner_reference(owner: Owning) -> JsonObject:
    """Controller reference for what belongs to this object."""
    return {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }

"""A `job.yaml` read for the command line: the same resource that the operator takes, with the same defaults."""

from pathlib import Path

import yaml

from rtj_operator.admission import RefusedError, admit
from rtj_operator.api import ResumableTrainingJob, parse_job
from rtj_operator.api.base import JsonObject, unknown_fields
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults, effective
from rtj_operator.api.names import DRILL_KIND, KIND
from rtj_operator.api.validation import Problem, validate


def read_job(path: Path) -> EffectiveSpec:
    """The only ResumableTrainingJob in the file, with defaults resolved. Raises ValueError naming file and field."""
    raw = _document(path)
    try:
        job = parse_job(raw)
        unknown = unknown_fields(job.spec, "spec")
        if unknown:
            raise ValueError(f"unknown field {', '.join(unknown)}: the API server would refuse it")
        return effective(job, OperatorDefaults())
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc


def check_job(path: Path) -> tuple[EffectiveSpec, list[Problem]]:
    """The same for a job that shall be applied, with what the operator would find wrong with it.

    Raises ValueError with the sentences of the API server, which would not take it.
    """
    try:
        job = admit(_document(path))
    except RefusedError as exc:
        reasons = "".join(f"\n  {line}" for line in str(exc).splitlines())
        raise ValueError(f"{path}: the API server would refuse it:{reasons}") from exc
    defaults = _defaults_of(job)
    return effective(job, defaults), validate(job, defaults)


def _defaults_of(job: ResumableTrainingJob) -> OperatorDefaults:
    """Which Secrets an operator allows is its chart's to say, and not known here."""
    secret = job.spec.checkpoint.store.credentials_secret
    return OperatorDefaults(allowed_secrets=frozenset({secret} if secret else ()))


def _document(path: Path) -> JsonObject:
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text(encoding="utf-8")) if isinstance(d, dict)]
    except OSError as exc:
        raise ValueError(f"{path} cannot be read: {exc.strerror}") from exc
    except yaml.YAMLError as exc:
        raise ValueError(f"{path} is not YAML: {exc}") from exc
    jobs = [d for d in documents if d.get("kind") == KIND]
    if not jobs and any(d.get("kind") == DRILL_KIND for d in documents):
        raise ValueError(
            f"{path} is a drill, which has no sizes of its own: it restores a checkpoint of the job in its jobName. "
            "Give that job's file (kubectl get rtj NAME -o yaml > job.yaml), and --resume to see what may open it"
        )
    if len(jobs) != 1:
        raise ValueError(f"{path} holds {len(jobs)} {KIND}s, one is needed")
    return jobs[0]

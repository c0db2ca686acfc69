"""A `job.yaml` read for the command line: the same resource that the operator takes, with the same defaults."""

from pathlib import Path

import yaml

from rtj_operator.api import parse_job
from rtj_operator.api.base import unknown_fields
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults, effective


def read_job(path: Path) -> EffectiveSpec:
    """The only ResumableTrainingJob in the file, with defaults resolved. Raises ValueError naming file and field."""
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text(encoding="utf-8")) if d]
    except OSError as exc:
        raise ValueError(f"{path} cannot be read: {exc.strerror}") from exc
    except yaml.YAMLError as exc:
        raise ValueError(f"{path} is not YAML: {exc}") from exc
    jobs = [d for d in documents if isinstance(d, dict) and d.get("kind") == "ResumableTrainingJob"]
    if len(jobs) != 1:
        raise ValueError(f"{path} holds {len(jobs)} ResumableTrainingJobs, one is needed")
    try:
        job = parse_job(jobs[0])
        unknown = unknown_fields(job.spec, "spec")
        if unknown:
            raise ValueError(f"unknown field {', '.join(unknown)}: the API server would refuse it")
        return effective(job, OperatorDefaults())
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc

"""Asking the API server whether it would take a placement's Job and pod, before the first placement and for a new spec.

The CRD keeps whatever a template holds (operator.md O15), and a Job is created with unknown fields dropped: a misspelt
`nodeSelector` would run the job somewhere else without a word. A server dry run with strict field validation finds it,
and what else of the template the API server refuses. Nothing is stored by it.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rtj_operator.api import Phase, ResumableTrainingJob
from rtj_operator.conditions import Reason
from rtj_operator.kube import (
    JOBS,
    PODS,
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    Kind,
    Kube,
    NotFound,
    Object,
)

log = logging.getLogger(__name__)
MOST_REMEMBERED = 4096
REFUSED_FOR = 30.0
"""Seconds before something refused is asked about again: a webhook may have changed its mind."""
_NO_RIGHT = "cannot create resource"
_NO_DRY_RUNS = "does not support dry run"
"""A webhook with side effects: the API server refuses the dry run, not the object."""


@dataclass(frozen=True)
class _Answer:
    problem: str
    until: float


class DryRun:
    """Dry runs of placements, one per object and spec. One instance per process."""

    def __init__(self, kube: Kube, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._answers: OrderedDict[tuple[str, str], _Answer] = OrderedDict()
        self._said: set[str] = set()

    async def problem(self, uid: str, digest: str, job: Object) -> str:
        """What the API server has against the Job `job` or its pods, `<Reason>: <its sentence>`; empty: nothing.

        `digest` is that of the spec. Raises Unavailable.
        """
        key = (uid, digest)
        known = self._answers.get(key)
        if known is not None and self._clock() < known.until:
            return known.problem
        sentence = await self._ask(JOBS, job) or await self._ask(PODS, pod_of(job))
        problem = f"{Reason.TEMPLATE_REFUSED}: {sentence}" if sentence else ""
        self._answers[key] = _Answer(problem, self._clock() + REFUSED_FOR if problem else float("inf"))
        self._answers.move_to_end(key)
        if len(self._answers) > MOST_REMEMBERED:
            self._answers.popitem(last=False)
        return problem

    async def _ask(self, kind: Kind, body: Object) -> str:
        meta = body["metadata"]
        try:
            await self._kube.create(kind, meta["namespace"], body, dry_run=True)
        except Invalid as exc:
            if _NO_DRY_RUNS in exc.sentence:
                self._say(f"a {kind.kind} cannot be tried out before it is made: {exc.sentence}")
                return ""
            return exc.sentence
        except Forbidden as exc:
            if _NO_RIGHT in exc.sentence:
                self._say(
                    f"a {kind.kind} cannot be tried out before it is made, so a misspelt field of a template is "
                    f"dropped silently: grant create on {kind.plural}: {exc.sentence}"
                )
            else:  # quota, pod security, service account: the Job's events say it when it comes to that (O16)
                log.info("%s/%s: a dry run was refused: %s", meta["namespace"], meta["name"], exc.sentence)
        except (AlreadyExists, Conflict, NotFound) as exc:
            log.debug("%s/%s: %s", meta["namespace"], meta["name"], exc)
        return ""

    def _say(self, sentence: str) -> None:
        """Once per process: it is about the cluster, not about a job."""
        if sentence not in self._said and len(self._said) < MOST_REMEMBERED:
            self._said.add(sentence)
            log.warning(sentence)


def needed(job: ResumableTrainingJob, digest: str) -> bool:
    """A placement may be made soon, and none has been made from this spec yet."""
    status, placement = job.status, job.status.placement
    if job.metadata.deletion_timestamp is not None or job.spec.managed_by:
        return False
    failed = status.phase is Phase.FAILED and job.metadata.generation == status.observed_generation
    if failed or status.phase is Phase.COMPLETE:
        return False
    return placement is None or placement.spec_hash != digest


def pod_of(job: Object) -> Object:
    """The pod of a Job's template, as the Job controller would make it, under a name of its own."""
    template, meta = job["spec"]["template"], job["metadata"]
    own = {"name": f"{meta['name']}-dry-run", "namespace": meta["namespace"]}
    return {
        "apiVersion": PODS.api_version,
        "kind": PODS.kind,
        "metadata": {**template["metadata"], **own},
        "spec": template["spec"],
    }

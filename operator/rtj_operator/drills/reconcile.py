"""One look at the drills of one job: the oldest that has not ended is brought further; when all have, the schedule of
the job decides about the next one. Level-triggered like the look at a job: everything is read afresh.
"""

import logging
from dataclasses import dataclass

from rtj_operator.api import InvalidJobError
from rtj_operator.api.drill import parse_drill
from rtj_operator.api.names import API_VERSION_FULL, DRILL_KIND
from rtj_operator.drills.evidence import commits_after
from rtj_operator.drills.further import Case, DrillSteps
from rtj_operator.drills.schedule import drill_body, next_due, scheduled, surplus
from rtj_operator.drills.words import DrillReason
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.kube import DRILLS, RTJ, AlreadyExists, Conflict, KubeError, NotFound, Object
from rtj_operator.prepared import Prepared, prepare
from rtj_operator.queue import Key
from rtj_operator.reconcile import TryLater
from rtj_operator.rights import missing_right

log = logging.getLogger(__name__)
LONGEST_SECONDS = 300.0
"""Between two looks at a schedule by time."""


@dataclass
class DrillReconciler:
    """Looks at the drills of jobs, by the jobs' keys."""

    steps: DrillSteps

    async def reconcile(self, key: Key) -> float | None:
        """Bring the drills of the job `key` further. Seconds until the next look; None: at the next event.

        Raises TryLater.
        """
        try:
            job = await self._job(key)
            cases = await self._cases(key, job)
            standing = [c for c in cases if not c.drill.ended]
            if not standing:
                return await self._schedule(job, cases) if job is not None else None
            turn, *waiting = standing
            for case in waiting:
                text = f"drill {turn.drill.metadata.name} of this job has not ended"
                await self.steps.tell(case, DrillReason.WAITING_FOR_TURN, text)
            return await self.steps.further(turn)
        except Conflict as exc:
            log.info("%s/%s: somebody wrote first, looking at its drills again: %s", *key, exc)
            return 0.05
        except KubeError as exc:
            raise TryLater(missing_right(exc) or str(exc)) from exc
        except (FenceTrouble, InvalidJobError) as exc:
            raise TryLater(str(exc)) from exc

    async def _job(self, key: Key) -> Object | None:
        try:
            return await self.steps.kube.get(RTJ, *key)
        except NotFound:
            return None

    async def _cases(self, key: Key, job: Object | None) -> list[Case]:
        """The drills of the job, oldest first; one of another schema is left to the operator that knows it."""
        found = []
        for raw in await self.steps.kube.list(DRILLS, key[0]):
            try:
                drill = parse_drill(raw)
            except InvalidJobError as exc:
                log.warning("drill %s/%s: %s", key[0], raw["metadata"]["name"], exc)
                continue
            if drill.spec.job_name == key[1] and drill.metadata.deletion_timestamp is None:
                whole = {**raw, "apiVersion": API_VERSION_FULL, "kind": DRILL_KIND}
                found.append(Case(whole, drill, job))
        return sorted(found, key=lambda c: (str(c.drill.metadata.creation_timestamp), c.drill.metadata.name))

    async def _schedule(self, raw: Object, cases: list[Case]) -> float | None:
        """The next drill of `spec.drill` when one is due, and old ones away."""
        if not raw["spec"].get("drill"):
            return None
        steps, drills = self.steps, [c.drill for c in cases]
        made = prepare(raw, steps.defaults, steps.settings, placing=False)
        job = made.job
        if job.metadata.deletion_timestamp is not None or made.problems:
            return None
        for old in surplus(scheduled(job, drills)):
            await steps.kube.delete(DRILLS, old.metadata.namespace, old.metadata.name, uid=old.metadata.uid)
        due = next_due(job, drills, steps.now())
        if due is None or isinstance(due, float):
            return None if due is None else min(due, LONGEST_SECONDS)
        if due.commits is not None and await self._commits(made, due.after_sequence) < due.commits:
            return LONGEST_SECONDS
        try:
            await steps.kube.create(DRILLS, job.metadata.namespace, drill_body(job))
        except AlreadyExists:
            name = drill_body(job)["metadata"]["name"]
            log.warning("%s: ResumeDrill %s exists and is not the schedule's", job.metadata.name, name)
            return LONGEST_SECONDS
        return 0.0

    async def _commits(self, made: Prepared, sequence: int) -> int:
        """Commits of the job's run behind that entry of its journal."""
        order = self.steps.order(made.job.metadata, made.spec, made.spec.run_id)
        return await self.steps.at_store(order, lambda stores, asked: commits_after(stores, asked, sequence))

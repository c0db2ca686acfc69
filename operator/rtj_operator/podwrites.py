"""What is written to pods: plans, nudges and deletions, some at a time for all jobs of this process."""

import asyncio
import logging
from collections.abc import Sequence

from rtj_operator.api.names import ANNOTATION_NUDGE
from rtj_operator.faults import AFTER_PLAN_ON_ONE_POD, Faults
from rtj_operator.kube import PODS, Conflict, Kube, NotFound
from trainer_sidecar.contract.plan import PLAN_ANNOTATION, Plan

MOST_AT_ONCE = 32
Pods = Sequence[tuple[str, str]]
"""(name, uid): a pod of the same name that was made since is another one, and is left alone."""
log = logging.getLogger(__name__)


class PodWrites:
    """Writes to pods of one namespace at a time. All methods raise KubeError."""

    def __init__(self, kube: Kube, faults: Faults) -> None:
        self._kube, self._faults = kube, faults
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    async def publish(self, plan: Plan, pods: Pods, namespace: str) -> None:
        """The plan as annotation on these pods: pod 0's sidecar first, since the others report to it."""
        text = plan.to_json()
        for first in pods[:1]:
            await self._annotate(namespace, *first, PLAN_ANNOTATION, text)
            self._faults.reached(AFTER_PLAN_ON_ONE_POD)
        await asyncio.gather(*(self._annotate(namespace, *pod, PLAN_ANNOTATION, text) for pod in pods[1:]))

    async def nudge(self, mark: str, pods: Pods, namespace: str) -> None:
        """Change the pods, so that their kubelets write the plan's file again."""
        await asyncio.gather(*(self._annotate(namespace, *pod, ANNOTATION_NUDGE, mark) for pod in pods))

    async def delete(self, pods: Pods, grace_seconds: int, namespace: str) -> None:
        """Delete these pods."""

        async def one(name: str, uid: str) -> None:
            async with self._slots:
                await self._kube.delete(PODS, namespace, name, uid=uid, grace_seconds=grace_seconds)

        await asyncio.gather(*(one(*pod) for pod in pods))

    async def _annotate(self, namespace: str, name: str, uid: str, annotation: str, value: str) -> None:
        async with self._slots:
            try:
                body = {"metadata": {"annotations": {annotation: value}}}
                await self._kube.patch(PODS, namespace, name, body, uid=uid)
            except (NotFound, Conflict) as exc:
                log.info("pod %s/%s went away before its %s came: %s", namespace, name, annotation, exc)

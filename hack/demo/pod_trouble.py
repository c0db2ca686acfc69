"""Why a pod does not start, in the kubelet's and the scheduler's own words. Pure: a pod in, a sentence out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# `ErrImagePull` alone may be one bad moment of a registry: the kubelet tries again before it says the first of these.
HOPELESS = {
    "ImagePullBackOff": "push it, correct the name, or give the pods a pull secret",
    "ErrImageNeverPull": "load it into the nodes, or let the kubelet pull it",
    "InvalidImageName": "correct the name",
    "CreateContainerConfigError": "add what it names",
}
"""Reasons that waiting does not cure, and what to do about them."""


def cannot_start(pod: dict[str, Any]) -> str:
    """Why a container of the pod will never run as things are; empty when there is no such reason."""
    for container in _containers(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason")) in HOPELESS:
            told = str(waiting.get("message") or "no message").strip()
            where = f"container {container['name']} of pod {pod['metadata']['name']}"
            return f"{where}, image {container.get('image')}: {reason}: {told}: {HOPELESS[reason]}"
    return ""


def not_scheduled(pod: dict[str, Any]) -> str:
    """What the scheduler says of a pod that it has no node for; empty when it has one, or has not said."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"pod {pod['metadata']['name']} has no node: {condition.get('message', 'no message')}"
    return ""


def _containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []

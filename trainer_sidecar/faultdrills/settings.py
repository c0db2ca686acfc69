"""What the caller has: template, store, key of the fault orders, and commands for what no API can do."""

import copy
from dataclasses import dataclass
from typing import Any

from trainer_sidecar.kube_commands.cluster import JsonObject

RPO_SECONDS, RTO_SECONDS = 60.0, 180.0
"""Limits of a drill, unless the caller states others."""


@dataclass(frozen=True)
class Settings:
    """Of a campaign."""

    template: JsonObject
    """`spec.template.spec` of a job: a container `trainer` with an image that has torch and the training library."""
    store: JsonObject
    """`spec.checkpoint.store` of a job, as the pods reach it."""
    namespace: str = ""
    """Empty: one of the campaign's own."""
    ranks: int = 2
    """Per pod."""
    fault_key: bytes | None = None
    """None: no fault orders."""
    cut_node: str = ""
    """Shell command that cuts the node `{node}` off, and the one that heals it; empty: none."""
    heal_node: str = ""
    why_no_key: str = "no fault key was given"

    @property
    def secret(self) -> str:
        """Name of the Secret with the store's credentials."""
        return str(self.store.get("credentialsSecret") or "rtj-store")

    def job_store(self) -> JsonObject:
        return dict(self.store)

    def pod_template(self) -> dict[str, Any]:
        return copy.deepcopy(self.template)

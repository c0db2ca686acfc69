"""What a demo on a cluster that one already has is told, beyond what every demo is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hack.demo.settings import JOB, Settings

GPU = "nvidia.com/gpu"
CONTROL_SUFFIX = "-control"
RELEASE = "rtj-demo"
STORE_SECRET = "rtj-store"
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
NAMESPACE_LABEL = "rtj-demo"
"""Carried by a namespace that a demo has made, and only by those; its value is the tag of the run."""


@dataclass(frozen=True)
class OwnSettings(Settings):
    """One demo run on a context of the user's kubeconfig."""

    context: str = ""
    store: str = ""
    """`s3://bucket/prefix`; the demo writes below a prefix of its own in it."""
    endpoint: str = ""
    """Of the S3 server as pods reach it; empty: Amazon's."""
    endpoint_here: str = ""
    """The same server as this machine reaches it; empty: as pods do."""
    region: str = ""
    operator_image: str = ""
    sidecar_image: str = ""
    trainer_image: str = ""
    gpus: int = 2
    """Of each pod; 0: none, and two ranks."""
    overlay_folder: Path | None = None
    take_over: bool = False
    """The namespace of another run may be used, and is this run's from then on."""
    credentials: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank_word(self) -> str:
        """What a rank runs on, in the plural."""
        return "GPUs" if self.gpus else "ranks"

    @property
    def store_url(self) -> str:
        """A prefix of its own for every run, since a journal is never started anew, and the end of a run deletes all
        below it. The namespace is in it, so that demos in two namespaces share none whatever their tags."""
        return f"{self.store.rstrip('/')}/rtj-demo-{self.run_tag}/{self.namespace}"

    @property
    def control_name(self) -> str:
        """Name of the job that is never interrupted."""
        return f"{JOB}{CONTROL_SUFFIX}"

    def job_overlay(self, name: str) -> Path:
        """Where the kustomization of a job is written."""
        return self.overlay / name

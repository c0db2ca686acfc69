"""Where a demo plays: what the course of a demo asks of a cluster, whosever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from hack.demo.cluster import Kubectl
from hack.demo.console import Console
from hack.demo.proofs import Evidence
from hack.demo.scenario import Scenario
from hack.demo.watch import Watch


class Place(Protocol):
    """A cluster with an operator, a store, and a story of faults that fits it. All may raise DemoError."""

    @property
    def cluster(self) -> Kubectl:
        """Its command lines."""
        ...

    @property
    def operator_namespace(self) -> str:
        """Where the operator's pods are."""
        ...

    @property
    def up(self) -> bool:
        """Whether there is something to look at after a failure, and to clean up."""
        ...

    def check(self, console: Console) -> None:
        """Find out whether it can begin; nothing of an earlier run is touched, here or there."""
        ...

    def prepare(self, console: Console) -> Evidence:
        """Bring up what is missing and train the control run, in the order that suits; what that left behind."""
        ...

    def apply_job(self) -> None:
        """Create the job that the faults will meet."""
        ...

    def watch(self, log: Path) -> Watch:
        """Eyes on that job; not started yet."""
        ...

    def scenario(self, watch: Watch, console: Console) -> Scenario:
        """The story."""
        ...

    def evidence(self) -> Evidence:
        """Journal and ledgers of the job."""
        ...

    def dataset_size(self) -> int:
        """Samples in the dataset that the ranks trained on."""
        ...

    def clean_up(self, console: Console) -> None:
        """Take away what the demo has brought."""
        ...

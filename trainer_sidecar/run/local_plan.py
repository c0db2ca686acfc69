"""What `rtj run` decides in the operator's place: identity of the run, topology of one machine, plan of an attempt."""

import re
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rtj_operator.api.spec import CompatibilityEntry
from rtj_operator.mesh import MeshSpec, Refusal, plan_size
from trainer_sidecar.contract.journal import Attempt, Owner, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import (
    CheckpointPolicy,
    Endpoint,
    FingerprintPolicy,
    Plan,
    VerificationPolicy,
)
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.store.forks import Fork

NAMESPACE = "local"


class MeshRefusedError(ValueError):
    """The ranks, the batch or the saved topology allow no plan. The message names what would work."""


@dataclass(frozen=True)
class LocalMesh:
    """The mesh that was asked for. `global_batch` None: that of the restore point, else one sample per replica;
    `max_micro_batch` None: that of the restore point, so that fewer ranks need no more memory each, else no limit."""

    ranks: int
    tp: int = 1
    pp: int = 1
    zero: int = 3
    alternatives: tuple[tuple[int, int], ...] = ()
    global_batch: int | None = None
    max_micro_batch: int | None = None
    matrix: Sequence[CompatibilityEntry] = ()

    def topology(self, _restore: RestorePoint | None, saved: Topology | None) -> Topology:
        """One node with all ranks, by the operator's own rules. Raises MeshRefusedError."""
        kept = saved.batch.global_batch_size if saved else max(1, self.ranks // (self.tp * self.pp))
        spec = MeshSpec(
            nodes=1,
            min_nodes=1,
            max_nodes=1,
            ranks_per_node=self.ranks,
            global_batch=self.global_batch or kept,
            tp=self.tp,
            pp=self.pp,
            zero=self.zero,
            alternatives=self.alternatives,
            max_micro_batch=self.max_micro_batch or (saved.batch.micro_batch_size if saved else None),
        )
        found = plan_size(spec, 1, saved, self.matrix)
        if isinstance(found, Refusal):
            sentence = found.sentence.removesuffix("; no size works")
            raise MeshRefusedError(f"{found.reason}: {sentence}; {self._what_works(spec, saved)}")
        return found

    def _what_works(self, spec: MeshSpec, saved: Topology | None) -> str:
        """The numbers of ranks next to the refused one. The operator's own words speak of nodes; here is only one."""

        def works(ranks: int) -> bool:
            return not isinstance(
                plan_size(replace(spec, ranks_per_node=ranks), 1, saved, self.matrix), Refusal
            )

        below = next((n for n in range(self.ranks - 1, 0, -1) if works(n)), None)
        above = next((n for n in range(self.ranks + 1, 2 * self.ranks + 1) if works(n)), None)
        known = [str(n) for n in (below, above) if n is not None]
        return f"--nproc {' or '.join(known)} would work" if known else "no --nproc near it works"


@dataclass(frozen=True)
class RunSettings:
    """One `rtj run`: what to train, where its checkpoints go, on which mesh, and how often it may fail.

    `script` is what torchrun runs (a script or `-m module`, then arguments). `max_restarts` bounds the failures in a
    row that bring no newer commit. `status_port` 0 takes a free port. `hang_timeout`: seconds without a step, 0 = off.
    """

    script: list[str]
    store_url: str
    run_id: str
    mesh: LocalMesh
    store_endpoint: str | None = None
    store_region: str | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    verification: VerificationPolicy = field(default_factory=VerificationPolicy)
    fingerprints: FingerprintPolicy = field(default_factory=FingerprintPolicy)
    max_restarts: int = 3
    backoff_seconds: float = 5.0
    max_backoff_seconds: float = 300.0
    hang_timeout: float = 1800.0
    status_port: int = 0
    ledger: Path | None = None
    fork: Fork | None = None
    """Where a run without attempts starts from."""
    again: bool = False
    """Start the script even where this very command has finished the run before."""

    @property
    def keys(self) -> RunKeys:
        """Names of the run's objects. Raises ValueError for a run id that cannot be part of a key."""
        return RunKeys(NAMESPACE, self.run_id)

    @property
    def owner(self) -> Owner:
        """The same for every `rtj run` of this run, so that one takes over from another without asking."""
        uid = uuid.uuid5(uuid.NAMESPACE_URL, f"{self.store_url.rstrip('/')}#{self.run_id}")
        return Owner(namespace=NAMESPACE, name=self.run_id, uid=str(uid))

    def may_be(self, owner: Owner) -> bool:
        """Whether `owner` is an `rtj run` of this run, from wherever its store was then: no object of a cluster."""
        ours = owner.namespace == NAMESPACE and owner.name == self.run_id and not owner.cluster
        return ours and uuid.UUID(owner.uid).version == 5

    def backoff(self, failures: int) -> float:
        """Seconds before the next attempt: none after the first failure since a newer commit, then doubling."""
        if failures <= 1:
            return 0.0
        return float(min(self.max_backoff_seconds, self.backoff_seconds * 2 ** min(failures - 2, 32)))


def default_run_id(script: list[str]) -> str:
    """Run id from the script's name: `path/to/my train.py` -> `my-train`, `-m pkg.train` -> `pkg.train`."""
    name = script[1] if script[0] == "-m" and len(script) > 1 else Path(script[0]).stem
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    return cleaned[:128] or "run"


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plan_for(settings: RunSettings, entry: Attempt, status_port: int, lineage: list[str]) -> Plan:
    """The plan of a fenced attempt: everything on this machine, a new master port each time."""
    return Plan(
        namespace=NAMESPACE,
        run_id=settings.run_id,
        owner=entry.owner,
        attempt=entry.attempt,
        epoch=entry.seq,
        nonce=entry.nonce,
        cause=entry.cause,
        topology=entry.topology,
        master=Endpoint(address="127.0.0.1", port=free_port()),
        coordinator=Endpoint(address="127.0.0.1", port=status_port),
        restore=entry.restore,
        lineage=lineage[:10],
        checkpoint=settings.checkpoint,
        verification=settings.verification,
        fingerprints=settings.fingerprints,
    )

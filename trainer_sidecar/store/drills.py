"""What drills have proven, as it stands in the run's journal: written once per drill, and read back by who plans.

A drill restores a checkpoint in a sandbox of its own; only its verdict comes here. From these entries alone it follows
which blocked transitions of a compatibility matrix are open, so that a lost cluster loses none of them.
"""

from dataclasses import dataclass
from typing import Any

from trainer_sidecar.contract.journal import Entry, Owner, Verified
from trainer_sidecar.contract.topology import Mesh, Topology
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, entry_head


@dataclass(frozen=True)
class DrillPassed:
    """The evidence of one drill that has passed."""

    checkpoint_id: str
    drill: str
    """What makes it one drill: its uid. A second call with the same one finds the first one's entry."""
    name: str
    """For people."""
    topology_from: Topology | None = None
    """Mesh that saved; None with `topology_to`: all bytes were read, nothing was restored."""
    topology_to: Topology | None = None
    fingerprints_sha256: str = ""
    detail: dict[str, Any] | None = None


def record_drill(
    journal: Journal, passed: DrillPassed, *, owner: Owner, writer: str, timeout: float | None = None
) -> Verified | None:
    """Append `Verified`, once per drill; None when the checkpoint is retired or quarantined by now.

    The journal must have been read. Raises as `Journal.append`.
    """
    found: Verified | None = None

    def decide(history: History) -> Entry | None:
        nonlocal found
        found = entry_of_drill(history, passed.drill)
        commit = history.manifests.get(passed.checkpoint_id)
        if found is not None or commit is None or not history.restorable(passed.checkpoint_id):
            return None
        return Verified(
            **entry_head(history, owner, writer),
            checkpoint_id=passed.checkpoint_id,
            sequence=commit.seq,
            manifest_sha256=commit.manifest.sha256,
            level="bytes" if passed.topology_to is None else "resume",
            topology_from=passed.topology_from,
            topology_to=passed.topology_to,
            fingerprints_sha256=passed.fingerprints_sha256,
            detail={"by": f"drill {passed.name}", "drill": passed.drill, **(passed.detail or {})},
        )

    entry = journal.append(decide, timeout=timeout)
    return entry if isinstance(entry, Verified) else found


def entry_of_drill(history: History, drill: str) -> Verified | None:
    """The entry that the drill of this uid has left."""
    said = (e for e in history.entries if isinstance(e, Verified) and e.detail.get("drill") == drill)
    return next(said, None)


def proven_transitions(history: History, fingerprints_sha256: str) -> dict[tuple[Mesh, Mesh], Verified]:
    """(mesh that saved, mesh that resumed) -> the newest drill that proves it for these fingerprints.

    What was drilled may be retired by now; under quarantine it proves nothing any more.
    """
    return {
        (e.topology_from.mesh, e.topology_to.mesh): e
        for e in history.entries
        if isinstance(e, Verified)
        and e.topology_from is not None
        and e.topology_to is not None
        and e.fingerprints_sha256 == fingerprints_sha256 != ""
        and e.checkpoint_id not in history.quarantined
    }

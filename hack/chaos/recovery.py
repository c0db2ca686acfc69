"""How long each fault was felt. Pure: from what ranks logged and the journal says."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from hack.chaos.audit import Evidence
from hack.chaos.record import Fired
from hack.chaos.schedule import Kind
from trainer_sidecar.contract.journal import Attempt, Manifest

UNTIL_A_COMMIT = (Kind.KILL_SIDECAR, Kind.THROTTLE_STORE, Kind.DELETE_LATEST)
"""Ranks train on meanwhile: it is over with the next commit. The others are over with the next step."""
UNTIL_AN_ATTEMPT = (Kind.KILL_RANK, Kind.DELETE_POD, Kind.CORRUPT_SHARD)
"""Over with the first step of an attempt that was fenced after them: what was hit may make another one."""


def seconds(fired: Fired, evidence: Sequence[Evidence]) -> float | None:
    """From the fault to the first step, or commit, of all jobs that it hit which began after it was seen to have
    happened; later faults count in. None when there was none."""
    ends = []
    for each in evidence:
        if fired.hit.jobs and each.job not in fired.hit.jobs:
            continue
        since = fired.hit.began if fired.fault.kind in UNTIL_AN_ATTEMPT else 0.0
        marks = _commits(each) if fired.fault.kind in UNTIL_A_COMMIT else _steps(each, since)
        ends.append(min((mark for mark in marks if mark > fired.hit.proven), default=None))
    if not ends or None in ends:
        return None
    return max(end for end in ends if end is not None) - fired.hit.began


def by_kind(fired: Sequence[Fired], evidence: Sequence[Evidence]) -> dict[Kind, list[float]]:
    """Seconds of each fault, by its kind, those left out that no job came back from."""
    found: dict[Kind, list[float]] = defaultdict(list)
    for each in fired:
        value = seconds(each, evidence)
        found[each.fault.kind] += [] if value is None else [value]
    return dict(found)


def median_and_most(values: Sequence[float]) -> str:
    """For people."""
    return f"{statistics.median(values):.1f} / {max(values):.1f}" if values else "–"


def _steps(evidence: Evidence, since: float) -> list[float]:
    """When the first rank ended a step, of the steps that all ranks of an attempt fenced since then ended."""
    attempts = [e for e in evidence.entries if isinstance(e, Attempt) and e.time > since]
    return [
        min(line.time for line in record.lines.values())
        for attempt in attempts
        for record in evidence.ledgers.of_epoch(attempt.seq)
        if len(record.lines) == attempt.topology.mesh.world_size
    ]


def _commits(evidence: Evidence) -> list[float]:
    return [entry.time for entry in evidence.entries if isinstance(entry, Manifest)]

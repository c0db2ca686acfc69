"""Runs drills one after the other in one scratch namespace, and makes the report of them.

A drill that breaks off fails, with what was missing; the next one runs all the same. Pods of a drill are gone before
the next begins, so that drills need the room of one job.
"""

import time
from collections.abc import Callable, Sequence

from trainer_sidecar import __version__
from trainer_sidecar.faultdrills.catalogue import Drill
from trainer_sidecar.faultdrills.outcome import Campaign, DrillResult, Limits, Seen, Verdict, judge
from trainer_sidecar.faultdrills.scratch import Scratch
from trainer_sidecar.faultdrills.stage import DrillError, NoOperatorError, NotRunError, Stage
from trainer_sidecar.kube_commands.cluster import ClusterError
from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.journal import JournalError

Say = Callable[[str], None]


def run(
    drills: Sequence[Drill],
    scratch: Scratch,
    store: Store,
    *,
    rpo_seconds: float | None,
    rto_seconds: float | None,
    say: Say,
) -> Campaign:
    """All drills; `rpo_seconds` and `rto_seconds` instead of their own limits. Raises ClusterError before the first."""
    started, clock = time.time(), time.monotonic()
    results = []
    for drill in drills:
        limits = Limits(
            rpo_seconds=drill.limits.rpo_seconds if rpo_seconds is None else rpo_seconds,
            rto_seconds=drill.limits.rto_seconds if rto_seconds is None else rto_seconds,
        )
        result = one(drill, limits, scratch, store)
        say(told(result))
        results.append(result)
    return Campaign(
        started=started,
        seconds=round(time.monotonic() - clock, 1),
        cluster=scratch.cluster.host,
        namespace=scratch.name,
        store=store.url,
        version=__version__,
        drills=results,
    )


def one(drill: Drill, limits: Limits, scratch: Scratch, store: Store) -> DrillResult:
    """One drill, whatever becomes of it."""
    stage, began = Stage(drill.name, scratch, store), time.monotonic()
    seen, reasons = Seen(), []
    try:
        seen = drill.run(stage)
        reasons = judge(seen, limits)
        verdict = Verdict.FAILED if reasons else Verdict.PASSED
    except NoOperatorError:
        stage.close()
        raise
    except NotRunError as exc:
        verdict, reasons = Verdict.NOT_RUN, [str(exc)]
    except (DrillError, ClusterError, StoreError, JournalError) as exc:
        seen = Seen(moments=stage.moments)
        verdict, reasons = Verdict.FAILED, [str(exc)]
    try:
        stage.close()
    except ClusterError as exc:
        verdict = Verdict.FAILED
        reasons = [*reasons, f"its job could not be taken away: {exc}"]
    return DrillResult(
        id=drill.id,
        title=drill.title,
        fault=drill.fault,
        expected=drill.expected,
        limits=limits,
        verdict=verdict,
        reasons=reasons,
        seconds=round(time.monotonic() - began, 1),
        seen=seen,
    )


def told(result: DrillResult) -> str:
    """One line for the terminal."""
    lost, took = result.seen.lost, result.seen.recovery_seconds
    parts = [f"{result.id:<14} {result.verdict.value:<8} {result.seconds:6.1f} s"]
    if took is not None:
        parts.append(f"RTO {took:.1f} s")
    if lost is not None:
        parts.append(f"RPO {lost.steps} steps, {lost.samples} samples, {lost.seconds:.1f} s")
    return "  ".join(parts) + "".join(f"\n{'':<15}{reason}" for reason in result.reasons)

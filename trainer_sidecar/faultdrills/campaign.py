"""Runs drills one after the other in one scratch namespace, and makes the report of them.

A drill that breaks off fails, with what was missing; the next one runs all the same. Pods of a drill are gone before
the next begins, so that drills need the room of one job. What is known when a campaign is broken off is reported.
"""

import logging
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

log = logging.getLogger(__name__)
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
    """All drills; `rpo_seconds` and `rto_seconds` instead of their own limits. Raises ClusterError before the first.

    Those behind an interruption, or behind the loss of the operator, have not run.
    """
    started, clock = time.time(), time.monotonic()
    results: list[DrillResult] = []
    broken = ""
    for drill in drills:
        limits = Limits(
            rpo_seconds=drill.limits.rpo_seconds if rpo_seconds is None else rpo_seconds,
            rto_seconds=drill.limits.rto_seconds if rto_seconds is None else rto_seconds,
        )
        try:
            result = _not_run(drill, limits, broken) if broken else one(drill, limits, scratch, store)
        except (NoOperatorError, KeyboardInterrupt) as exc:
            if not results:
                raise
            broken = f"the campaign was broken off in {drill.id}: {str(exc) or 'interrupted'}"
            result = _not_run(drill, limits, broken)
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
    except (NoOperatorError, KeyboardInterrupt):
        stage.close()
        raise
    except NotRunError as exc:
        verdict, reasons = Verdict.NOT_RUN, [str(exc)]
    except (DrillError, ClusterError, StoreError, JournalError) as exc:
        seen = Seen(moments=stage.moments)
        verdict, reasons = Verdict.FAILED, [str(exc)]
    except Exception as exc:  # a bug of one drill must not lose what the others have shown
        log.exception("%s broke off", drill.id)
        seen = Seen(moments=stage.moments)
        verdict, reasons = Verdict.FAILED, [f"the drill itself broke off: {type(exc).__name__}: {exc}"]
    try:
        stage.close()
    except ClusterError as exc:
        verdict = Verdict.FAILED
        reasons = [*reasons, f"its job could not be taken away: {exc}"]
    return _result(drill, limits, verdict, reasons, seen, time.monotonic() - began)


def _not_run(drill: Drill, limits: Limits, why: str) -> DrillResult:
    return _result(drill, limits, Verdict.NOT_RUN, [why], Seen(), 0.0)


def _result(
    drill: Drill, limits: Limits, verdict: Verdict, reasons: list[str], seen: Seen, seconds: float
) -> DrillResult:
    return DrillResult(
        id=drill.id,
        title=drill.title,
        fault=drill.fault,
        expected=drill.expected,
        limits=limits,
        verdict=verdict,
        reasons=reasons,
        seconds=round(seconds, 1),
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

"""D1, D7, D9: faults while a save is under way. They need fault points in the sidecar, armed by signed orders."""

import time
from collections.abc import Container, Mapping
from functools import partial
from uuid import uuid4

from trainer_sidecar.contract.fault_order import FIRED, FaultOrder
from trainer_sidecar.contract.journal import Attempt, Cause, Manifest
from trainer_sidecar.faultdrills.measure import between, step_of
from trainer_sidecar.faultdrills.outcome import Check, Seen
from trainer_sidecar.faultdrills.stage import SIDECAR, DrillError, Stage
from trainer_sidecar.kube_commands.cluster import JsonObject
from trainer_sidecar.store.fence import FenceRequest, fence_and_pick
from trainer_sidecar.store.journal import Journal

FREEZE_SECONDS, SLEEP_SECONDS = 60.0, 8.0
"""Until its pod is deleted; until the next attempt stands. A sidecar that is silent for ten seconds is ended."""
WRITES_OF_A_SAVE = 16
"""Or a few less: the first save commits."""
FAILING_REQUESTS = 12
"""Each is tried again after a random wait of up to 10 s: half a minute."""
MOST_GROWTH = 64 << 20
"""Bytes of memory that a sidecar may have more after an outage than before it."""


def killed_while_saving(stage: Stage) -> Seen:
    """D1: all processes die when some ranks have written and others have not."""
    ranks = stage.scratch.settings.ranks
    stage.start(faults=(FaultOrder(point="after-shard-put", after=ranks, seconds=FREEZE_SECONDS),))
    first = stage.trains()
    safe = stage.commit()
    pod = stage.pods()[0]
    stage.wait("frozen save", partial(stage.fired, pod, "after-shard-put"))
    stage.note("sidecar frozen after its first shard")
    unfinished = _unfinished(stage)
    fault = time.monotonic()
    stage.delete_pod(pod)
    second, heard = stage.resumed(first)
    lost = stage.lost(first, second)
    stage.commit(beyond=step_of(second), epoch=second.seq)
    history = stage.history()
    restored = second.restore.checkpoint_id if second.restore else "nothing"
    checks = [
        Check(
            name="the unfinished checkpoint is never chosen",
            holds=unfinished not in history.manifests and restored == safe.checkpoint_id,
            seen=f"restored {restored}; unfinished was {unfinished}; committed before {safe.checkpoint_id}",
        ),
        *stage.proofs(),
    ]
    fired = f"frozen at after-shard-put, {unfinished} had shards and no manifest in the store; then the pod was deleted"
    return stage.seen(fired, checks, lost, heard - fault)


def _unfinished(stage: Stage) -> str:
    """The checkpoint that has shards and no manifest in the store. Raises DrillError when there is none."""
    kept = stage.history().manifests
    found: dict[str, list[str]] = {}
    for info in stage.store.list(stage.keys.checkpoints_prefix):
        checkpoint, _, name = info.key.removeprefix(stage.keys.checkpoints_prefix).partition("/")
        found.setdefault(checkpoint, []).append(name)
    for checkpoint, names in found.items():
        if (
            checkpoint not in kept
            and any(n.endswith(".distcp") for n in names)
            and "manifest.json" not in names
        ):
            return checkpoint
    raise DrillError("no unfinished checkpoint stands in the store: the fault came too early or too late")


def store_away(stage: Stage) -> Seen:
    """D7: the store fails every write for a while."""
    stage.start(faults=(FaultOrder(point="store-write", after=WRITES_OF_A_SAVE, times=FAILING_REQUESTS),))
    first = stage.trains()
    stage.commit()
    pod, seen = stage.pods()[0], _Outage()
    stage.wait("failing request", partial(stage.fired, pod, "store-write"))
    before = stage.commit()
    memory = _memory(stage, pod)
    stage.note("writes to the store fail")
    deadline = time.monotonic() + 240
    while len(fired := stage.fired(pod, "store-write")) < FAILING_REQUESTS:
        seen.look(stage)
        if time.monotonic() > deadline:
            raise DrillError(f"only {len(fired)} of {FAILING_REQUESTS} requests have failed after 240 s")
        time.sleep(0.5)
    seconds = float(fired[-1]["time"]) - float(fired[0]["time"])
    over = time.monotonic()
    stage.note(f"{len(fired)} requests have failed in {seconds:.1f} s")
    last = stage.commit(beyond=before.step)
    recovered = time.monotonic()
    stage.commit(beyond=last.step)
    grown = _memory(stage, pod) - memory
    fired, history = stage.fired(pod, "store-write"), stage.history()
    new = sum(attempt.attempt > first.attempt for attempt in history.attempts)
    checks = [
        *seen.checks(new, {*history.manifests, *history.aborted}),
        *_kept_its_bounds(grown, len(fired)),
        *stage.proofs(),
    ]
    at_risk = between(stage.trail, first, before.step, seen.last)
    said = f"{len(fired)} writes failed inside the sidecar over {seconds:.1f} s"
    return stage.seen(said, checks, at_risk, recovered - over)


class _Outage:
    """What /status said while the store was away."""

    def __init__(self) -> None:
        self.saves: list[str] = []
        self.errors: set[str] = set()
        self.first = self.last = 0

    def look(self, stage: Stage) -> None:
        status = stage.sidecar()
        if status is None:
            return
        if status.in_flight is not None and status.in_flight.checkpoint_id not in self.saves:
            self.saves.append(status.in_flight.checkpoint_id)
        if status.store_error:
            self.errors.add(status.store_error)
        if status.progress is not None:
            self.first = self.first or status.progress.step
            self.last = max(self.last, status.progress.step)

    def checks(self, new_attempts: int, settled: Container[str]) -> list[Check]:
        """What must hold of it."""
        return [
            Check(
                name="at most one save in flight",
                holds=all(save in settled for save in self.saves[:-1]),
                seen=f"in flight during the outage, each settled before the next: {', '.join(self.saves) or 'none'}",
            ),
            Check(
                name="training goes on",
                holds=self.last > self.first and not new_attempts,
                seen=f"from step {self.first} to {self.last} during the outage, {new_attempts} new attempts",
            ),
            Check(
                name="the lag is visible",
                holds=bool(self.errors),
                seen=f"store_error of /status: {next(iter(self.errors), 'never')}",
            ),
        ]


def _kept_its_bounds(grown: int, fired: int) -> list[Check]:
    return [
        Check(
            name="memory stays flat",
            holds=grown <= MOST_GROWTH,
            seen=f"the sidecar's grew by {grown / 2**20:.1f} MiB, allowed {MOST_GROWTH >> 20} MiB",
        ),
        Check(
            name="the fault fires as often as ordered",
            holds=fired == FAILING_REQUESTS,
            seen=f"{fired} of {FAILING_REQUESTS}",
        ),
    ]


def _memory(stage: Stage, pod: JsonObject) -> int:
    """Resident bytes of the sidecar."""
    code = "print(open('/proc/1/statm').read().split()[1])"
    return int(stage.cluster.execute(pod, SIDECAR, ["python3", "-c", code])) * 4096


def old_pod_wakes_up(stage: Stage) -> Seen:
    """D9: the process that is about to commit sleeps, and wakes up when the next attempt has begun.

    An operator that is well ends a pod that is silent for ten seconds, and never has two attempts at work: the next one
    is begun by this command, as an operator would that cannot see the pod.
    """
    stage.start(nodes=2, ranks=1, faults=(FaultOrder(point="before-claim", after=1, seconds=SLEEP_SECONDS),))
    first = stage.trains()
    stage.commit()
    pods = stage.pods()
    heard_of_it = stage.overheard(pods[0])
    stage.wait("frozen commit", lambda: any(line.get("message") == FIRED for line in heard_of_it))
    stage.note("sidecar of pod 0 frozen right before its commit")
    fault, before = time.monotonic(), set(_manifests(stage))
    second = _fence(stage, first)
    asleep = not _woke_up(heard_of_it)
    stage.note(f"attempt {second.attempt} stands in the journal")
    stage.wait("waking up", lambda: _woke_up(heard_of_it), 3 * SLEEP_SECONDS)
    stage.note("the frozen sidecar woke up")
    third, heard = stage.resumed(second)
    lost = stage.lost(first, third)
    stage.commit(beyond=step_of(third), epoch=third.seq)
    late = [m for m in _manifests(stage).values() if m.epoch == first.seq and m.checkpoint_id not in before]
    checks = [
        Check(
            name="the fence stood before it woke up",
            holds=asleep,
            seen=f"it {'slept still' if asleep else 'was awake already'} when the next attempt stood in the journal",
        ),
        Check(
            name="it cannot commit",
            holds=not late,
            seen=f"{len(late)} commits of epoch {first.seq} since it froze; entry {second.seq} is the next attempt's",
        ),
        *stage.proofs(),
    ]
    fired = (
        f"frozen before-claim for {SLEEP_SECONDS:g} s with a save that all ranks had written; attempt {second.attempt} "
        "fenced meanwhile"
    )
    return stage.seen(fired, checks, lost, heard - fault)


def _fence(stage: Stage, before: Attempt) -> Attempt:
    """The next attempt of the run, in the journal. Nobody trains in it: it is the job's operator that sees it, too."""
    request = FenceRequest(
        owner=before.owner,
        attempt_nonce=uuid4().hex,
        cause=Cause.OPERATOR,
        writer="rtj drill faults",
        plan_for=lambda *_: before.topology,
        known_attempts=before.attempt,
        known_commits=True,
    )
    return fence_and_pick(Journal(stage.store, stage.keys), request, timeout=SLEEP_SECONDS).entry


def _woke_up(log: list[JsonObject]) -> bool:
    return any(line.get("message") == "fault over" for line in log)


def _manifests(stage: Stage) -> Mapping[str, Manifest]:
    """All commits in the journal, by checkpoint."""
    return stage.history().manifests

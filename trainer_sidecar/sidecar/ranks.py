"""Local ranks and the state of the trainer: who has said hello, who died, how the epoch ended.

A rank's socket is its pulse: when it closes without a good outcome on the volume, readiness fails at once, and the
operator learns it by push (operator.md O4, O5). This module decides nothing about saves.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer_sidecar.contract.messages import Hello, ReportProgress
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import PhaseTimes, ProgressStatus, RankStatus, TrainerState
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar import workdir
from trainer_sidecar.sidecar.notes import Notes

log = logging.getLogger(__name__)

_GOOD = (OutcomeKind.FINISHED, OutcomeKind.SAVED_AND_STOPPED)
_MAX_OUTCOME_BYTES = 256 * 1024
_PHASES = {"Rendezvous": "rendezvous", "Restored": "restored", "FirstStep": "first_step"}


@dataclass
class _Rank:
    rank: int
    pid: int
    connection: int
    """Which connection speaks for the rank; the end of an older one means nothing."""
    alive: bool = True
    lost: bool = False
    step: int = 0


@dataclass
class _Epoch:
    plan: Plan
    expected: range
    ranks: dict[int, _Rank] = field(default_factory=dict)
    outcome: Outcome | None = None
    progress: ProgressStatus | None = None
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerView:
    """The trainer as `/status` shows it. `plan` None: no epoch is served yet."""

    state: TrainerState
    ready: bool
    reason: str
    plan: Plan | None = None
    ranks: list[RankStatus] = field(default_factory=list)
    outcome: Outcome | None = None
    progress: ProgressStatus | None = None
    phases: PhaseTimes = field(default_factory=PhaseTimes)


class Ranks:
    """Thread-safe registry of this pod's ranks for the plan's epoch."""

    def __init__(self, volume: Volume, notes: Notes, pod_index: int, on_lost: Callable[[int], None]) -> None:
        self._volume, self._notes, self._pod_index, self._on_lost = volume, notes, pod_index, on_lost
        self._lock = threading.Lock()
        self._epoch: _Epoch | None = None
        self._pod_seen: tuple[int, int] | None = None

    def begin(self, plan: Plan) -> None:
        """Serve a plan's epoch; the ranks of the one before are forgotten."""
        per_node = plan.topology.ranks_per_node
        first = self._pod_index * per_node
        expected = range(first, first + per_node) if self._pod_index < plan.topology.nodes else range(0)
        with self._lock:
            self._epoch = _Epoch(plan, expected, phases=self._notes.phases)
            self._reach(self._epoch, "plan_seen")
            self._pod_seen = None

    @property
    def local(self) -> range:
        """Global numbers of the ranks that this pod runs in the plan's epoch."""
        return self._epoch.expected if self._epoch else range(0)

    def hello(self, message: Hello, connection: int) -> None:
        """Register a rank. Raises ValueError when it cannot be a rank of this pod."""
        with self._lock:
            state = self._epoch
            if state is None:
                raise ValueError("there is no plan yet")
            world = state.plan.topology.mesh.world_size
            if message.rank not in state.expected or message.world_size != world:
                raise ValueError(
                    f"rank {message.rank} of {message.world_size} is not of this pod: the plan has ranks "
                    f"{state.expected.start}..{state.expected.stop - 1} of {world} here"
                )
            state.ranks[message.rank] = _Rank(message.rank, message.pid, connection)
            self._reach(state, "ranks_started")
        log.info("rank said hello", extra={"epoch": message.epoch, "rank": message.rank, "pid": message.pid})

    def gone(self, rank: int, connection: int) -> None:
        """A rank's connection has ended: the rank is dead, or has ended well."""
        with self._lock:
            state = self._epoch
            known = state.ranks.get(rank) if state else None
            if state is None or known is None or known.connection != connection:
                return
            known.alive = False
            outcome = self._read(
                self._volume.outcome_dir(state.plan.epoch) / f"rank-{rank:05d}.json", state.plan.epoch
            )
            known.lost = outcome is None or outcome.kind not in _GOOD
            if known.lost:
                self._reach(state, "rank_lost")
        log.info("rank gone", extra={"rank": rank, "lost": known.lost})
        self._on_lost(rank)

    def progress(self, message: ReportProgress) -> None:
        """Numbers at a step boundary. The pod's lowest rank's are the ones shown."""
        now = time.time()
        with self._lock:
            state = self._epoch
            known = state.ranks.get(message.rank) if state else None
            if state is None or known is None:
                return
            known.step = message.step
            if message.phase:
                self._reach(state, _PHASES[message.phase])
            if message.rank == state.expected.start:
                state.progress = ProgressStatus(
                    step=message.step,
                    epoch=message.epoch,
                    samples=message.samples,
                    loss=message.loss,
                    grad_norm=message.grad_norm,
                    step_seconds=message.step_seconds,
                    save_cost_seconds=message.save_cost_seconds,
                    time=now,
                )

    def poll(self) -> None:
        """Look for the launcher's pod outcome; cheap when nothing has changed."""
        state = self._epoch
        if state is None:
            return
        path = self._volume.outcome_dir(state.plan.epoch) / "pod.json"
        try:
            info = path.stat()
        except OSError:
            return
        seen = (info.st_mtime_ns, info.st_ino)
        if seen == self._pod_seen:
            return
        outcome = self._read(path, state.plan.epoch)
        with self._lock:
            self._pod_seen = seen
            if outcome is not None and self._epoch is state:
                state.outcome = outcome
                self._reach(state, "ended")
                log.info("trainer ended", extra={"epoch": outcome.epoch, "outcome": outcome.kind.value})

    def _reach(self, state: _Epoch, phase: str) -> None:
        if phase in state.phases:
            return
        state.phases[phase] = time.time()
        try:
            self._notes.reach(phase, state.phases[phase])
        except OSError as exc:  # times are shown, nothing is built on them
            log.warning("a phase could not be noted", extra={"phase": phase, "reason": str(exc)})

    def _read(self, path: Path, epoch: int) -> Outcome | None:
        try:
            outcome = Outcome.model_validate_json(workdir.read_file(path, _MAX_OUTCOME_BYTES))
        except FileNotFoundError:
            return None
        except ValueError as exc:
            log.warning("an outcome file cannot be read", extra={"file": str(path), "reason": str(exc)})
            return None
        return outcome if outcome.epoch == epoch else None

    def view(self) -> "TrainerView":
        """Everything of one epoch at one moment: an outcome is never shown beside another epoch's number."""
        with self._lock:
            state = self._epoch
            trainer, ready, reason = _readiness(state)
            if state is None:
                return TrainerView(trainer, ready, reason)
            ranks = sorted(state.ranks.values(), key=lambda r: r.rank)
            return TrainerView(
                trainer,
                ready,
                reason,
                plan=state.plan,
                ranks=[RankStatus(rank=r.rank, pid=r.pid, alive=r.alive, step=r.step) for r in ranks],
                outcome=state.outcome,
                progress=state.progress,
                phases=PhaseTimes(**state.phases),
            )

    def any_alive(self) -> bool:
        with self._lock:
            return self._epoch is not None and any(r.alive for r in self._epoch.ranks.values())


def _readiness(state: _Epoch | None) -> tuple[TrainerState, bool, str]:
    if state is None:
        return TrainerState.WAITING, True, "Waiting for a plan."
    epoch = state.plan.epoch
    if state.outcome is not None:
        kind = state.outcome.kind
        said = f": {state.outcome.message}" if state.outcome.message else ""
        return TrainerState.ENDED, kind in _GOOD, f"The ranks of epoch {epoch} have ended {kind.value}{said}."
    hello, of = len(state.ranks), len(state.expected)
    lost = sorted(r.rank for r in state.ranks.values() if r.lost)
    at = TrainerState.RUNNING if hello == of else TrainerState.STARTING
    if lost:
        named = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        return at, False, f"Rank {named} of epoch {epoch} closed its connection without a good outcome."
    if hello < of:
        return at, True, f"Starting epoch {epoch}: {hello} of {of} ranks have said hello."
    return at, True, f"All {of} local ranks of epoch {epoch} are alive or have ended well."

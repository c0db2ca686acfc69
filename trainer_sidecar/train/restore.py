"""From a committed checkpoint to a running state, in the order of design 4; what does not fit is refused by name.

Compare -> materialise -> poison -> fetch and copy -> coverage and digest -> scheduler, scaler, cursor -> RNG last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import FrozenFile, Witness
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.train import (
    compare,
    extra_state,
    fingerprint_policy,
    materialise,
    rng,
    state_digest,
    tagged,
    trainable,
    transfer,
    zero,
)
from trainer_sidecar.train.accumulation import Accumulation, without_gradients
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.capture import Captured, State
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.digest import MODULUS, add, to_hex
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import ResumeRefused, SidecarRefused, holds_folders
from trainer_sidecar.train.frozen import references, split
from trainer_sidecar.train.kept_settings import kept_settings
from trainer_sidecar.train.left import Left, Tolerance
from trainer_sidecar.train.ownership import Planner, make_plan
from trainer_sidecar.train.sidecar_client import LONG_REPLY_SECONDS
from trainer_sidecar.train.whole import Whole, whole

log = logging.getLogger("rtj.train")
_STATE = ("model/", "optimizer/", "extra/")
"""What a checkpoint and a run must both have. Gradients of an open window are judged apart."""


@dataclass
class Clockwork:
    """Objects beside model and optimizers that carry JSON state."""

    schedulers: list[Any]
    scaler: Any
    seed: int
    fingerprints: Mapping[str, str]
    accept: Sequence[str] = ()
    """Patterns of changed fingerprints that the script consents to."""
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    """Objects whose state belongs to one rank, such as a stateful data loader: same mesh only."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Of fields among the fingerprints."""
    may_lack: bool = False
    """Schedulers were spoken of: there are none but these."""


@dataclass(frozen=True)
class Inherited:
    """References of the restored checkpoint to frozen weights; `digest` of what this rank owns of them."""

    names: tuple[str, ...]
    digest: int
    files: list[FrozenFile]


@dataclass
class Resumed:
    """What came out of a restore."""

    report: ResumeReport
    witness: Witness | None
    saved_epoch: int
    left: Left
    frozen: Inherited | None
    """None when the checkpoint holds other frozen weights than this run has."""
    written: frozenset[str]
    """Weights that nothing trains and that the checkpoint holds with the rest: something writes to them."""
    loss_spread: float = 0.0
    """Standard deviation of the losses before the save."""


@dataclass
class Restorer:
    """One restore of an opened checkpoint into the live objects."""

    env: Environment
    state: State
    clockwork: Clockwork
    cursor: Cursor
    planner: Planner
    agreement: Agreement
    accumulation: Accumulation
    seconds: dict[str, float] = field(default_factory=dict)

    def restore(self, opened: m.RestoreOpened) -> Resumed:
        """Raises ResumeRefused when the checkpoint does not fit or cannot be read, SidecarLost, Fenced."""
        begin = time.monotonic() - self.seconds.get("open", 0.0)
        try:
            self._compare(opened)
            order = self._bucket_checks(opened)
            targets = self._materialise(opened)
            needed, fetched = self._load(opened)
        except SidecarRefused as error:
            raise _refused(error, opened.manifest.checkpoint_id) from error
        checks = [d.check() for d in self._changed] + self._digest_checks(opened)
        checks += [Check(name="settings of the script", passed=True, detail=kept) for kept in self._kept]
        checks += order + self._window_checks(opened)
        self._put_back(opened, targets)
        checks += self._state_checks(opened)
        derived = self._random(opened)
        self.env.client.tell(m.CloseRestore(rank=self.env.rank))
        self.seconds["total"] = time.monotonic() - begin
        report = self._report(opened, checks, derived, needed, fetched)
        if not report.passed:
            failed = [c for c in report.checks if not c.passed]
            raise ResumeRefused(
                [f"check {c.name!r} failed: expected {c.expected}, found {c.found}" for c in failed]
            )
        left = Left.now(self.state, self.env.device, Tolerance.of(self.env.plan, self.clockwork.accept))
        spread = opened.manifest.training_state.statistics.get("lossStd", 0.0)
        met = opened.witness, opened.manifest.epoch, left, self._inherited
        return Resumed(report, *met, self._written, spread)

    def _timed(self, phase: str, action: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        result = action()
        self.seconds[phase] = round(time.monotonic() - begin, 6)
        return result

    def _compare(self, opened: m.RestoreOpened) -> None:
        saved, now = opened.manifest.training_state, self._whole(self._per_rank_differences(opened))
        counts = {
            "schedulers": len(self.clockwork.schedulers),
            "scalers": int(self.clockwork.scaler is not None),
        }
        found = compare.tensor_differences(opened.tensors, now.tensors, ("model/", "extra/"))
        found += compare.optimizer_differences(saved, now.state)
        found += self._zero_differences(opened, now)
        found += compare.presence_differences(saved, counts, now.state.extra or {})
        found += compare.order_differences(saved.data, self.cursor.describe())
        changed = fingerprint_policy.differences(
            opened.manifest.fingerprints,
            self.clockwork.fingerprints,
            self.env.plan.fingerprints,
            self.clockwork.accept,
            self.clockwork.defaults,
        )
        found += [str(d) for d in changed if d.stops]
        self._changed = [d for d in changed if not d.stops]
        found += now.problems
        found += trainable.differences(self.state.wrapped, saved.trainable, now.state.trainable)
        if sorted(map(sorted, saved.aliases)) != sorted(map(sorted, now.state.aliases)):
            found.append(
                f"tied parameters: {saved.aliases} in the checkpoint, {now.state.aliases} in this run"
            )
        if found:
            raise ResumeRefused(found)
        mine = [tagged.encode(s.state_dict(), "scheduler") for s in self.clockwork.schedulers]
        self._kept = kept_settings((saved.optimizers, saved.schedulers), (now.state.optimizers, mine))
        for sentence in [*map(str, self._changed), *self._kept] if self.env.rank == 0 else ():
            log.warning("%s", sentence)

    def _bucket_checks(self, opened: m.RestoreOpened) -> list[Check]:
        """DDP's buckets as they were, before any state is loaded."""
        same = opened.manifest.topology.mesh == self.env.plan.topology.mesh
        return self.state.buckets.restore(opened.manifest.training_state.gradient_buckets, same_mesh=same)

    def _whole(self, problems: Sequence[str] = ()) -> Whole:
        """The live state of all ranks; blocks where ranks hold different things. Keeps this rank's as `_captured`."""
        self._captured = self.state.capture()
        frozen = split(self._captured)[1]
        try:
            return whole(self.agreement, self.state, self._captured, frozen, problems)
        except ValueError as error:
            raise ResumeRefused([str(error)]) from error

    def _zero_differences(self, opened: m.RestoreOpened, now: Whole) -> list[str]:
        saved, mesh = opened.manifest.topology.mesh, self.env.plan.topology.mesh
        found = zero.differences(
            opened.manifest.training_state.optimizers, now.state.optimizers, (saved.dp, mesh.dp)
        )
        if saved.zero != mesh.zero:
            found.append(f"ZeRO stage of the mesh: {saved.zero} in the checkpoint, {mesh.zero} in this run")
        return found

    def _per_rank_differences(self, opened: m.RestoreOpened) -> list[str]:
        """Read this rank's own state; on another mesh, rank 0's tells whether there is any."""
        mesh = self.env.plan.topology.mesh
        same = opened.manifest.topology.mesh == mesh
        reply = self.env.client.ask(m.AskRankState(rank=self.env.rank if same else 0), m.RankStateReply)
        self._rank_state = reply.rank_state
        saved, now = self._rank_state.get("objects", {}).keys(), self.clockwork.per_rank.keys()
        if saved != now:
            return [f"per_rank objects: {sorted(saved)} in the checkpoint, {sorted(now)} in this run"]
        if now and not same:
            return [
                f"per_rank objects {sorted(now)} were saved on {opened.manifest.topology.mesh} and cannot be shared "
                f"out on {mesh}: resume on the same mesh, or let the session feed the data (data=, Streams)"
            ]
        return []

    def _materialise(self, opened: m.RestoreOpened) -> dict[str, Any]:
        """Optimizer state, the state dicts of extra objects, and the gradients of an open window, which need the mask
        of what trains; not loaded yet. Returns the state dicts."""
        saved = opened.manifest.training_state
        t = opened.tensors
        stored = {n: (d, tuple(s)) for n, d, s in zip(t.names, t.dtypes, t.shapes, strict=True)}
        problems = materialise.optimizer_state(self.state, saved.optimizers, stored)
        now = self._whole(problems)
        self._frozen, self._trained = now.frozen, {f"model/{name}" for name in saved.trainable}
        problems = now.problems or compare.tensor_differences(t, now.tensors, _STATE)
        if problems:
            raise ResumeRefused(problems)
        current = {p.entry.name: p.tensor for p in self._captured.pieces}
        self._masked = trainable.restore(self.state.model, self.state.names, saved.trainable)
        try:
            self._taken = self.accumulation.take_over(opened.manifest, t, self._rank_state)
        except ValueError as error:
            raise ResumeRefused([str(error)]) from error
        self._captured.pieces += self._taken.pieces
        targets = {k: extra_state.targets(doc, current) for k, doc in (saved.extra or {}).items()}
        self._redirect(targets, self._captured)
        return targets

    def _redirect(self, targets: dict[str, Any], captured: Captured) -> None:
        """Load tensors of extra objects into the fresh targets: their state_dict() may hand out copies."""
        fresh: dict[str, torch.Tensor] = {}
        for key, target in targets.items():
            extra_state.collect(target, extra_state.below("extra", key), fresh)
        for piece in captured.pieces:
            if piece.entry.name in fresh:
                piece.local = fresh[piece.entry.name]

    def _load(self, opened: m.RestoreOpened) -> tuple[int, int]:
        """Fetch and copy all pieces; returns (bytes needed, bytes read from the store)."""
        pieces = self._captured.pieces
        materialise.poison([piece.local for piece in pieces])
        slices = self.env.client.ask(m.AskSlices(), m.SlicesReply).slices
        self._references = references(opened, slices)
        numbers = {name: i for i, name in enumerate(opened.tensors.names)}
        reads = self._timed("plan", lambda: transfer.plan_reads(pieces, numbers, slices, self.env.rank))
        windows = transfer.Windows(Path(opened.folder), opened.files)
        fetched = self._timed("load", lambda: transfer.load(self.env.client, reads, windows))
        return sum(r.shared.numel * r.piece.entry.itemsize for r in reads), fetched

    def _digest_checks(self, opened: m.RestoreOpened) -> list[Check]:
        held = {name for file in self._references for name in file.tensors.names}
        self._written = frozenset(self._frozen - held - self._trained)
        live, frozen = split(without_gradients(self._captured), self._written)
        plan, once = (
            self.planner.plan(live.entries),
            make_plan(frozen.entries, self.env.rank, self.env.world_size),
        )
        unchanging = state_digest.of_live(once, frozen)
        mine = self._timed("digest", lambda: add(state_digest.of_live(plan, live), unchanging))
        names = tuple(p.entry.name for p in frozen.pieces)
        same = held == self._frozen - self._written
        self._inherited = Inherited(names, unchanging, self._references) if same else None
        (total,) = self.agreement.sum_exact([mine])
        found = to_hex(total % MODULUS)
        expected = opened.manifest.state_digest
        return [Check(name="state digest", passed=found == expected, expected=expected, found=found)]

    def _window_checks(self, opened: m.RestoreOpened) -> list[Check]:
        """What became of a window that was open at the save, and whether its gradients are those that were saved."""
        taken = self._taken
        checks = [Check(name="accumulation window", passed=True, detail=taken.says)] if taken.says else []
        if not taken.pieces:
            return checks
        gradients = Captured(pieces=taken.pieces)
        plan = make_plan(gradients.entries, self.env.rank, self.env.world_size)
        (total,) = self.agreement.sum_exact([state_digest.of_live(plan, gradients)])
        return [*checks, _equal("gradients", opened.manifest.gradient_digest, to_hex(total % MODULUS))]

    def _put_back(self, opened: m.RestoreOpened, targets: dict[str, Any]) -> None:
        saved = opened.manifest.training_state
        for key, target in targets.items():
            if key in self.state.extra:  # a module of another pipeline stage has its state there
                self.state.extra[key].load_state_dict(target)
        for scheduler, document in zip(self.clockwork.schedulers, saved.schedulers, strict=True):
            scheduler.load_state_dict(tagged.decode(document))
        if self.clockwork.scaler is not None:
            self.clockwork.scaler.load_state_dict(tagged.decode(saved.scaler))
        for key, obj in self.clockwork.per_rank.items():
            obj.load_state_dict(tagged.decode(self._rank_state["objects"][key]))
        self.cursor.restore(opened.manifest.progress)
        self.accumulation.go_on(self._taken)

    def _state_checks(self, opened: m.RestoreOpened) -> list[Check]:
        """Compare the live objects, read again, with what was saved."""
        saved, progress = opened.manifest.training_state, opened.manifest.progress
        now = self._whole().state
        checks = [
            _equal("step", progress.step, self.cursor.step),
            _equal("cursor", progress.samples, self.cursor.samples),
            _equal("sample digest", progress.sample_digest, self.cursor.sample_digest),
            _equal("learning rates", _rates(saved.optimizers), _rates(now.optimizers)),
            _equal("optimizer groups", _groups(saved.optimizers), _groups(now.optimizers)),
            _equal("moments", _moments(saved.optimizers), _moments(now.optimizers)),
            _equal("tied parameters", sorted(map(sorted, saved.aliases)), sorted(map(sorted, now.aliases))),
            trainable.check(saved.trainable, now.trainable, self._masked),
        ]
        schedulers = [tagged.encode(s.state_dict()) for s in self.clockwork.schedulers]
        checks.append(Check(name="schedulers", passed=schedulers == saved.schedulers))
        if self.clockwork.scaler is not None:
            checks.append(_equal("scaler", saved.scaler, tagged.encode(self.clockwork.scaler.state_dict())))
        return checks + self._first_batch(opened)

    def _first_batch(self, opened: m.RestoreOpened) -> list[Check]:
        if self.cursor.order is None:
            return []
        found = self.cursor.batch_digest()
        witness = opened.witness
        if witness is None or witness.epoch != opened.manifest.epoch or not witness.steps:
            detail = "no witness: the order is a pure function of seed and cursor"
            return [Check(name="first batch", passed=True, found=found, detail=detail)]
        saved, now = opened.manifest.topology.batch.global_batch_size, self.cursor.global_batch
        if saved != now:
            detail = f"another one: the global batch was {saved}, is {now}"
            return [Check(name="first batch", passed=True, found=found, detail=detail)]
        return [_equal("first batch", witness.steps[0].batch_digest, found)]

    def _random(self, opened: m.RestoreOpened) -> list[str]:
        """RNG is the last thing restored; on another mesh every rank derives its own."""
        env, mesh = self.env, self.env.plan.topology.mesh
        if opened.manifest.topology.mesh == mesh:
            rng.restore(self._rank_state["rng"], env.device)
            return []
        rng.derive(self.clockwork.seed, opened.manifest.progress.step, env.dp_rank, env.device)
        return [f"rng of dp rank {r} from (seed, step, dp rank)" for r in range(mesh.dp)]

    def _report(
        self, opened: m.RestoreOpened, checks: list[Check], derived: list[str], needed: int, fetched: int
    ) -> ResumeReport:
        needed, fetched = self.agreement.sum_exact([needed, fetched])
        plan, manifest = self.env.plan, opened.manifest
        return ResumeReport(
            epoch=plan.epoch,
            attempt=plan.attempt,
            checkpoint_id=manifest.checkpoint_id,
            step=manifest.progress.step,
            topology_from=manifest.topology,
            topology_to=plan.topology,
            checks=checks,
            resharded=manifest.topology.mesh != plan.topology.mesh,
            derived=derived,
            bytes_needed=needed,
            bytes_fetched=fetched,
            seconds={phase: round(s, 4) for phase, s in self.seconds.items()},
            reprocessed_samples=self._taken.rerun,
        )


def open_point(env: Environment, point: RestorePoint) -> m.RestoreOpened:
    """What the sidecar knows of the checkpoint. Raises ResumeRefused when it cannot be read or is no state."""
    request = m.OpenRestore(checkpoint_id=point.checkpoint_id)
    try:
        opened = env.client.ask(request, m.RestoreOpened, seconds=LONG_REPLY_SECONDS)
    except SidecarRefused as error:
        raise _refused(error, point.checkpoint_id) from error
    if opened.manifest.training_state.folders is not None:
        raise ResumeRefused([holds_folders(point.checkpoint_id)])
    return opened


def _refused(error: SidecarRefused, checkpoint_id: str) -> ResumeRefused:
    return ResumeRefused([f"{error} (checkpoint {checkpoint_id})"])


def _equal(name: str, expected: Any, found: Any) -> Check:
    return Check(name=name, passed=expected == found, expected=expected, found=found)


def _rates(optimizers: list[Any]) -> list[Any]:
    return [[group["fields"].get("lr") for group in o["groups"]] for o in optimizers]


def _groups(optimizers: list[Any]) -> list[int]:
    return [len(o["groups"]) for o in optimizers]


def _moments(optimizers: list[Any]) -> list[int]:
    return [sum(len(slots) for slots in o["state"].values()) for o in optimizers]

"""One schedule from its first fence to the last outcome: processes start, die, come back; a second attempt fences.

The parent plays the operator: it fences through the journal as the operator does and writes plan files. It never looks
into what it kills.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

from hack.soak.chance import RANKS, Schedule
from hack.soak.pod import Pod
from hack.soak.processes import Process
from hack.soak.rank import Rank
from hack.soak.server import free_port
from trainer_sidecar.contract.journal import Cause, Owner
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import CheckpointPolicy, Endpoint, Plan, Retention
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.fence import Fenced, FenceRequest, fence_and_pick
from trainer_sidecar.store.journal import Journal

OWNER = Owner(namespace="soak", name="soak", uid="soak")
END_SECONDS = 40.0
"""By when the second attempt must have its outcome, whatever was killed before."""
_STEP = 10


class StuckError(Exception):
    """The second attempt's save got no outcome in time: something waits for ever."""


@dataclass
class Told:
    """What happened, for the audit and the tally."""

    fences: list[Fenced] = field(default_factory=list)
    acknowledged: list[tuple[str, str, str]] = field(default_factory=list)
    """(outcome, checkpoint id, sequence) as ranks were told."""
    killed: dict[str, int] = field(default_factory=dict)
    crashed: str = ""
    """The crash point that fired."""

    def count(self, what: str) -> None:
        self.killed[what] = self.killed.get(what, 0) + 1


class Story:
    """Runs once. `own` is the parent's store, `fresh` the one that children use after their fork."""

    def __init__(self, schedule: Schedule, root: Path, own: Store, fresh: Store) -> None:
        self._schedule, self._root, self._own, self._fresh = schedule, root, own, fresh
        self.keys = RunKeys("soak", f"seed-{schedule.seed}-{uuid4().hex[:6]}")
        self.told = Told()
        self._all: list[Process] = []
        self._notes: list[Path] = []
        self._ranks: list[Process] = []
        self._pods: list[Pod] = []
        self._zombies: list[Pod] = []
        self._back: list[tuple[float, Pod]] = []

    def run(self) -> Told:
        """Raises StuckError, and whatever the fence raises. No process is left in any case."""
        try:
            self._first_attempt()
            self._second_attempt()
            self._wait_for_end()
        finally:
            self._collect()
        return self.told

    def _first_attempt(self) -> None:
        schedule = self._schedule
        self._place("first")
        plan = self._fence(Cause.FIRST)
        for pod in self._pods:
            pod.start(schedule.fault if pod.index == 0 else "")
        self._start_ranks(plan, [_STEP * (i + 1) for i in range(schedule.saves)])
        if not schedule.at_once:
            self._wait_for_seal()
        began = time.monotonic()
        for kill in schedule.kills:
            if kill.after > schedule.fence_after:
                break
            self._until(began + kill.after)
            self._kill(kill.role, kill.index, kill.back)
        self._until(began + schedule.fence_after)

    def _wait_for_seal(self) -> None:
        """Start-up over: from here on it is saves that are met. No longer than two seconds."""
        deadline = time.monotonic() + 2.0
        seals = [
            p.volume.rank_stage(p.index * RANKS // self._schedule.nodes) / "seal.json" for p in self._pods
        ]
        while not all(seal.exists() for seal in seals) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _second_attempt(self) -> None:
        schedule, began = self._schedule, time.monotonic() - self._schedule.fence_after
        crashed = self._pods[0]
        if schedule.new_placement:
            self._zombies = self._pods  # nobody tells them; only the journal can stop them
            self._place("second")
        else:
            for rank in self._ranks:
                rank.kill()
        plan = self._fence(Cause.POD_LOST if schedule.new_placement else Cause.RANK_FAILED)
        if schedule.fault and not crashed.alive() and crashed.sidecar and crashed.sidecar.killed:
            self.told.crashed = schedule.fault.partition(":")[0]
        for pod in self._pods:
            if not pod.alive():
                pod.start()
        self._back.clear()
        start = plan.restore.step if plan.restore else 0
        self._start_ranks(plan, [start + _STEP])
        for kill in (k for k in schedule.kills if k.after > schedule.fence_after and k.role == "sidecar"):
            self._until(began + kill.after)
            self._kill("sidecar", kill.index, 0.05 if kill.back is None else kill.back)

    def _wait_for_end(self) -> None:
        """Every rank of the second attempt has an outcome."""
        deadline = time.monotonic() + END_SECONDS
        waited = self._notes[-RANKS:]
        while not all(path.exists() for path in waited):
            if time.monotonic() > deadline:
                missing = [path.name for path in waited if not path.exists()]
                raise StuckError(f"no outcome for {', '.join(missing)} after {END_SECONDS:g} s")
            self._until(time.monotonic() + 0.02)

    # -- what the operator does

    def _place(self, name: str) -> None:
        root = self._root / name
        nodes = self._schedule.nodes
        self._pods = [Pod(root / f"pod-{i}", i, free_port(), self.keys, self._fresh) for i in range(nodes)]

    def _fence(self, cause: Cause) -> Plan:
        nodes = self._schedule.nodes
        topology = Topology(
            nodes=nodes,
            ranks_per_node=RANKS // nodes,
            mesh=Mesh(dp=RANKS),
            batch=Batch(global_batch_size=RANKS, micro_batch_size=1, accumulation=1),
        )
        request = FenceRequest(
            owner=OWNER,
            attempt_nonce=uuid4().hex,
            cause=cause,
            writer="soak",
            plan_for=lambda _point, _saved: topology,
            known_attempts=len(self.told.fences),
        )
        fenced = fence_and_pick(Journal(self._own, self.keys, parallel=1), request)
        self.told.fences.append(fenced)
        plan = Plan(
            namespace=self.keys.namespace,
            run_id=self.keys.run_id,
            owner=OWNER,
            attempt=fenced.attempt,
            epoch=fenced.epoch,
            nonce=fenced.entry.nonce,
            cause=cause,
            topology=topology,
            master=Endpoint(address="127.0.0.1", port=1),
            coordinator=Endpoint(address="127.0.0.1", port=self._pods[0].port),
            restore=fenced.restore,
            checkpoint=CheckpointPolicy(retention=Retention(keep_last=2)),
        )
        for pod in self._pods:
            pod.write_plan(plan)
        return plan

    def _start_ranks(self, plan: Plan, steps: list[int]) -> None:
        per = plan.topology.ranks_per_node
        self._ranks = []
        for number in range(RANKS):
            notes = self._root / f"told-{plan.attempt}-{number}"
            rank = Rank(plan, number, self._pods[number // per].volume, notes)
            self._notes.append(notes)
            made = Process(partial(rank.run, steps), self._root / f"rank-{plan.attempt}-{number}.log")
            self._ranks.append(made)
            self._all.append(made)

    # -- time and death

    def _until(self, moment: float) -> None:
        """Sleep until then; sidecars come back meanwhile when it is their time."""
        while True:
            now = time.monotonic()
            due = [(at, pod) for at, pod in self._back if at <= now]
            self._back = [(at, pod) for at, pod in self._back if at > now]
            for _, pod in due:
                if not pod.alive():
                    pod.start()
            if now >= moment:
                return
            upcoming = min([moment, *(at for at, _ in self._back)])
            time.sleep(max(0.0, upcoming - now))

    def _kill(self, role: str, index: int, back: float | None) -> None:
        if role == "rank":
            if self._ranks[index].kill():
                self.told.count("ranks")
            return
        pod = self._pods[index]
        if pod.kill():
            self.told.count("coordinators" if index == 0 else "sidecars")
        elif self._schedule.fault and index == 0 and pod.sidecar is not None and pod.sidecar.killed:
            self.told.crashed = self._schedule.fault.partition(":")[0]
        if back is not None:
            self._back.append((time.monotonic() + back, pod))

    def _collect(self) -> None:
        for process in self._all:
            process.kill()
        for pod in (*self._pods, *self._zombies):
            pod.kill()
        for path in self._notes:
            for line in path.read_text().splitlines() if path.exists() else ():
                outcome, checkpoint, sequence = line.split(" ")
                self.told.acknowledged.append((outcome, checkpoint, sequence))

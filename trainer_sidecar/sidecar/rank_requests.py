"""Requests of local ranks, one method each: what a rank may ask, and who answers it."""

import threading
import time

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.base import Document
from trainer_sidecar.sidecar import fault
from trainer_sidecar.sidecar.evidence import Evidence
from trainer_sidecar.sidecar.frozen import Frozen
from trainer_sidecar.sidecar.plan_watch import PlanWatch
from trainer_sidecar.sidecar.ranks import Ranks
from trainer_sidecar.sidecar.restores import Restores
from trainer_sidecar.sidecar.saves import SaveRefusedError, Saves
from trainer_sidecar.sidecar.server import RequestError

HELLO_WAIT_SECONDS = 5.0
"""A launcher may see a plan a moment before its sidecar does: a rank of a newer epoch waits so long for ours."""


class RankRequests:
    """Answers for `SocketServer`. `served` is the epoch that the sidecar has made ready for; Hello waits for it."""

    def __init__(
        self,
        plans: PlanWatch,
        ranks: Ranks,
        saves: Saves,
        restores: Restores,
        evidence: Evidence,
        frozen: Frozen,
    ) -> None:
        self._frozen = frozen
        self._plans, self._ranks, self._saves = plans, ranks, saves
        self._restores, self._evidence = restores, evidence
        self._served = 0
        self._changed = threading.Condition()

    @property
    def served(self) -> int:
        """Epoch whose ranks are welcome; 0 before the first plan."""
        return self._served

    def serve(self, epoch: int) -> None:
        """From now on ranks of this epoch are welcome."""
        with self._changed:
            self._served = epoch
            self._changed.notify_all()

    def hello(self, message: m.Hello, connection: int) -> m.Done:
        if message.contract_version != CONTRACT_VERSION:
            raise RequestError(
                "WrongContract",
                f"the library has contract version {message.contract_version}, this sidecar {CONTRACT_VERSION}: "
                "use library and sidecar of the same release",
            )
        deadline = time.monotonic() + HELLO_WAIT_SECONDS
        with self._changed:
            while self._served < message.epoch and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            served = self._served
        if served != message.epoch:
            raise RequestError(
                "WrongEpoch",
                f"the rank is of epoch {message.epoch}, this sidecar serves {served or 'none yet'}",
            )
        try:
            self._ranks.hello(message, connection)
        except ValueError as exc:
            raise RequestError("BadRequest", str(exc)) from exc
        return m.Done(orders=fault.concerns_ranks())

    def gone(self, message: m.Hello, connection: int) -> None:
        if message.epoch == self._served:
            self._ranks.gone(message.rank, connection)

    def handle(self, hello: m.Hello, message: m.Request) -> Document:
        """Answer a request of the rank that said `hello`. Raises RequestError."""
        if hello.epoch != self._served:
            raise RequestError(
                "Fenced", f"the rank is of epoch {hello.epoch}, this sidecar serves epoch {self._served} now"
            )
        rank = getattr(message, "rank", hello.rank)
        if rank != hello.rank and not isinstance(message, m.AskRankState):
            raise RequestError("BadRequest", f"rank {hello.rank} cannot speak for rank {rank}")
        if (ordered := fault.of_rank(message)) is not None:
            return ordered
        match message:
            case m.Sealed():
                self._sealed(message)
            case m.GiveUp():
                self._saves.give_up(message.save_id, message.rank, message.reason[:1024])
            case m.AskSave():
                if message.awaited:
                    self._saves.is_awaited(message.save_id)
                return self._saves.reply(message.save_id).model_copy(update=self._interval(hello.epoch))
            case m.KeepFrozen():
                self._keep_frozen(message)
            case m.AskFrozen():
                return self._frozen.reply(message.rank, message.file)
            case m.ReportProgress():
                self._ranks.progress(message)
            case m.AddWitness():
                self._evidence.take_witness(message)
            case m.SendReport():
                self._evidence.take_report(message.report)
            case m.OpenRestore():
                return self._restores.open(message.checkpoint_id)
            case m.AskSlices():
                return self._slices(message)
            case m.Fetch():
                return self._restores.fetch(message)
            case m.AskRankState():
                return m.RankStateReply(rank_state=self._restores.rank_state(message.rank))
            case m.CloseRestore():
                self._restores.close(message.rank, self._ranks.local)
            case m.Hello():
                raise RequestError("BadRequest", "Hello was said before")
        return m.Done()

    def _interval(self, epoch: int) -> dict[str, float]:
        """The interval of that epoch's plan as it is now, which may be another one than when the ranks began."""
        plan = self._plans.plan
        return {"interval_seconds": plan.checkpoint.interval_seconds} if plan and plan.epoch == epoch else {}

    def _sealed(self, message: m.Sealed) -> None:
        try:
            self._saves.sealed(message.save_id, message.rank)
        except SaveRefusedError as exc:
            raise RequestError("BadRequest", str(exc)) from exc

    def _keep_frozen(self, message: m.KeepFrozen) -> None:
        try:
            self._frozen.keep(message)
        except ValueError as exc:
            raise RequestError("BadRequest", str(exc)) from exc

    def _slices(self, message: m.AskSlices) -> Document:
        try:
            return m.SlicesReply(slices=self._restores.get().slices(message.tensors))
        except ValueError as exc:
            raise RequestError("BadRequest", str(exc)) from exc

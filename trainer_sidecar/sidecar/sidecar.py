"""The sidecar as a whole: which part hears of what, in which order. No logic of saves or restores lives here."""

import logging
import os
import threading
import time
from collections.abc import Callable

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.plan import Order, Plan
from trainer_sidecar.contract.status import PeerReply, PeerReport, SidecarStatus
from trainer_sidecar.sidecar import fault, workdir
from trainer_sidecar.sidecar.config import PLAN_POLL_SECONDS, Config
from trainer_sidecar.sidecar.coordinator import Coordinator
from trainer_sidecar.sidecar.evidence import Evidence
from trainer_sidecar.sidecar.frozen import Frozen
from trainer_sidecar.sidecar.housekeeping import Housekeeping
from trainer_sidecar.sidecar.http_server import HttpServer, Pages
from trainer_sidecar.sidecar.metrics import Metrics
from trainer_sidecar.sidecar.notes import Notes
from trainer_sidecar.sidecar.peers import Heard, Reporter
from trainer_sidecar.sidecar.plan_watch import PlanWatch
from trainer_sidecar.sidecar.rank_requests import RankRequests
from trainer_sidecar.sidecar.ranks import Ranks
from trainer_sidecar.sidecar.report_auth import ReportKeys
from trainer_sidecar.sidecar.restores import Restores
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.saves import Saves
from trainer_sidecar.sidecar.server import SocketServer
from trainer_sidecar.sidecar.settling import Settling
from trainer_sidecar.sidecar.standing_watch import StandingWatch
from trainer_sidecar.store.base import Store

log = logging.getLogger(__name__)


class Sidecar:
    """Built, then `start`ed once; everything runs in daemon threads until `drain` returns."""

    def __init__(self, config: Config, open_store: Callable[[], Store]) -> None:
        """Prepares the volume and binds the HTTP port. Raises OSError."""
        self._config = config
        self._ended = threading.Event()
        volume = config.volume
        workdir.prepare(volume)
        self.is_coordinator = config.pod_index == 0
        self.metrics = Metrics()
        writer = f"sidecar/{config.pod_name}"
        self.run = Run(config.keys, open_store, writer=writer)
        self.notes = Notes(volume.notes)
        self.saves = Saves(volume, self.notes, self.run, self.metrics, config.threads)
        self.ranks = Ranks(volume, self.notes, config.pod_index, self._rank_gone)
        self.plans = PlanWatch(config.plan_file, config.keys, self._on_plan)
        self.restores = Restores(volume, self.run, self.metrics, config.threads)
        self.evidence = Evidence(self.run, self.saves, self.metrics, writes=self.is_coordinator)
        self.coordinator = Coordinator(self.saves, self.run)
        self.housekeeping = Housekeeping(self.run.store, config.keys, writer, self.metrics)
        self.coordinator.on_commit = self.housekeeping.committed
        self.coordinator.on_abort = self.housekeeping.aborted
        self.heard = Heard(config.silence)
        self.reporter = Reporter(config.pod_index, self.saves, self.run, config.silence)
        self.standing = StandingWatch(self.run)
        self.reporter.on_newer = self.standing.wake
        self.saves.on_change = self.coordinator.wake if self.is_coordinator else self.reporter.wake
        self._settling = Settling(volume, self.notes, self.saves, self.run)
        self.requests = RankRequests(
            self.plans, self.ranks, self.saves, self.restores, self.evidence, Frozen(volume, self.run)
        )
        self.report_keys = ReportKeys()
        pages = Pages(self.status, self.metrics_text, self._report, self.report_keys)
        self.http = HttpServer(config.status_host, config.status_port, pages)
        self._socket = SocketServer(
            volume.socket, self.requests.hello, self.requests.gone, self.requests.handle
        )

    def start(self) -> None:
        """Install the launcher, serve. The plan is looked at first, so that what is sealed goes on at once."""
        if not workdir.install_launcher(self._config.volume):
            log.warning("this installation holds no launcher: trainers must bring rtj-launch themselves")
        self.evidence.start()
        self.standing.start()
        if self.is_coordinator:
            self.coordinator.start()
            self.housekeeping.start()
        else:
            self.reporter.start()
        self.plans.poll()
        self._socket.start()
        self.http.start()
        self.run.open_ahead()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Stop listening for HTTP and plans at once. A process simply ends instead; this is for who embeds it."""
        self._ended.set()
        self.http.stop()

    def drain(self) -> None:
        """Return once nothing sealed is left to upload or commit; the grace period, if any, ends it earlier."""
        self.saves.hurry()
        while self._busy():
            time.sleep(PLAN_POLL_SECONDS)
        if not self.is_coordinator:
            self.reporter.report_once()

    def _busy(self) -> bool:
        save = self.saves.current
        if save is None:
            return not self.evidence.idle()
        if save.faults:
            return True
        if not self.is_coordinator:
            return len(save.uploaded) < len(save.phases)
        sealed = len(set(save.phases) | save.sealed_elsewhere | save.uploaded_elsewhere)
        # A save that some rank never sealed cannot commit; others may still seal while one of them lives.
        return sealed == save.of or self.ranks.any_alive() or len(save.uploaded) < len(save.phases)

    def _watch(self) -> None:
        while not self._ended.wait(PLAN_POLL_SECONDS):
            try:
                self.plans.poll()
                self.ranks.poll()
            except Exception:
                # This thread is the only way to a new epoch; a bug must be seen, and must not end it.
                log.exception("watching failed")
                time.sleep(1)

    def _on_plan(self, plan: Plan) -> None:
        if plan.epoch != self.requests.served:
            first = self.notes.epoch < plan.epoch
            interrupted = self.saves.begin(plan)
            self.restores.begin(plan, first=first)
            self.evidence.begin(plan)
            self._settling.begin(plan, interrupted, first=first)
            self.notes.begin(plan.epoch)
            self.heard.begin(plan)
            self.standing.begin(plan)
            self.housekeeping.begin(plan)
            # Last: from here on `/status` shows this epoch, and nothing of an older one may stand beside it.
            self.ranks.begin(plan)
            if first and self._config.read_ahead:
                self.restores.read_ahead(self.ranks.local)
            if not first:  # of a save that this sidecar finds, nobody may be left who waits for it
                self.saves.let_go()
        if plan.order is not Order.RUN:
            self.saves.hurry()
        self.report_keys.begin(plan)
        self.coordinator.begin(plan)
        self.reporter.begin(plan)
        self.requests.serve(plan.epoch)

    def _rank_gone(self, rank: int) -> None:
        plan = self.plans.plan
        if plan is not None:
            self.saves.hurry()
            self._settling.adopt(plan, rank)

    def _report(self, report: PeerReport) -> PeerReply | None:
        if not self.is_coordinator:
            return None
        self.heard.report(report)
        return self.coordinator.answer(report)

    def metrics_text(self) -> bytes:
        save = self.saves.current
        if save is not None:
            self.metrics.commit_lag.set(save.seconds)
        last = self.run.last_committed
        if last is not None:
            self.metrics.last_step.set(last.step)
        return self.metrics.text()

    def status(self) -> SidecarStatus:
        """What `/status` shows."""
        view, save = self.ranks.view(), self.saves.current
        plan, outcome = view.plan, view.outcome
        deadline = plan.checkpoint.save_timeout_seconds if plan else 0.0
        errors = list(save.errors.values()) if save else []
        wants_plan, launcher = self.standing.wants_plan, workdir.launcher_listens(self._config.volume)
        also = [self.standing.reason if wants_plan else "", self.plans.error]
        return SidecarStatus(
            contract_version=CONTRACT_VERSION,
            pod_index=self._config.pod_index,
            run=f"{self._config.keys.namespace}/{self._config.keys.run_id}",
            pod=self._config.pod_name,
            ready=view.ready,
            reason=" ".join([view.reason, *(f"Also: {text}." for text in also if text)]),
            epoch=plan.epoch if plan else 0,
            attempt=plan.attempt if plan else 0,
            order=self.plans.plan.order if self.plans.plan else None,
            wants_plan=wants_plan,
            fenced=self.standing.fenced,
            trainer=view.state,
            launcher_gone=launcher is False,
            launcher_listens=launcher is True,
            ranks=view.ranks,
            outcome=outcome,
            oom_kills=outcome.oom_kills if outcome else 0,
            progress=view.progress,
            in_flight=save.status(deadline, errors) if save else None,
            last_committed=self.run.last_committed,
            last_verified=self.run.last_verified,
            consecutive_failures=self.saves.consecutive_failures,
            last_failure=self.saves.last_failure[:1024],
            last_save_seconds=self.saves.last_save_seconds,
            store_keys=bool(os.environ.get("AWS_ACCESS_KEY_ID")),
            store_error=(errors or [self.standing.error])[0],
            resume=self.evidence.report,
            lost_peers=self.heard.lost() if self.is_coordinator else self.reporter.lost(),
            quiet_peers=self.heard.quiet() if self.is_coordinator else [],
            phases=view.phases,
            faults_fired=fault.fired(),
        )

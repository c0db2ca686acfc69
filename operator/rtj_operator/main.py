"""`rtj-operator`: flags and environment to a running process.

Every flag has an environment variable of the same name (RTJ_OPERATOR_...), so that the chart sets either. SIGTERM ends
the process within seconds and safely: there is nothing that a later one would not find. Nobody waits for a thread that
waits for a store.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

import kopf

from rtj_operator import flags
from rtj_operator.api.effective import OperatorDefaults
from rtj_operator.api.names import LABEL_JOB
from rtj_operator.apply import Applier
from rtj_operator.drills.further import DrillSteps
from rtj_operator.drills.loop import TURNS, DrillLoop
from rtj_operator.drills.reconcile import DrillReconciler
from rtj_operator.elector import Elector, LostLeadership
from rtj_operator.events import EventPoster
from rtj_operator.faultgate import FaultGate, read_key
from rtj_operator.faults import Faults
from rtj_operator.firstlook import FirstLook
from rtj_operator.kube import RTJ, Kube, KubeError, connect
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.observe import Observer
from rtj_operator.pods import PodSettings
from rtj_operator.queue import Turns
from rtj_operator.reconcile import Reconciler
from rtj_operator.rights import missing_right
from rtj_operator.runtime import Runtime, serve
from rtj_operator.watches import Supervisor, WatchOptions
from trainer_sidecar import __version__
from trainer_sidecar.contract.volume import ENV_STORE_ENDPOINT, ENV_STORE_REGION

log = logging.getLogger("rtj_operator")
ENV_PREFIX = "RTJ_OPERATOR_"
RELEASE_SECONDS = 5.0
"""Of the grace period, for giving back the Lease."""
COLLECT_AFTER = (20_000, 10, 10)
"""New objects before each generation of Python's collector. A thousand jobs are read in pages of a hundred thousand
objects each, none of them garbage: by Python's own numbers a walk over all that this process knows, half a second in
which nothing else happens, was made for every second page."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the operator until SIGTERM or SIGINT, and end the process: 0 when it was told to, 1 when it could not go on.

    Raises SystemExit when the flags are wrong.
    """
    options = parse(argv)
    _log_to_stderr(options.log_level, options.log_format)
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(*COLLECT_AFTER)
    loop, code = asyncio.Runner(), 0  # never closed: that, and Python's own end, would wait for the threads
    try:
        loop.run(run(options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        log.info("interrupted")
    except LostLeadership as exc:
        log.error("%s: ending, to stand by again", exc)
        code = 1
    except Exception:
        log.exception("the operator cannot go on")
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags, each with its environment variable as default. Raises SystemExit naming those with an unusable value."""
    parser = argparse.ArgumentParser(prog="rtj-operator", description="Operator for ResumableTrainingJobs.")
    parser.add_argument("--version", action="version", version=f"rtj-operator {__version__}")

    def flag(name: str, default: str, text: str) -> None:
        variable = ENV_PREFIX + name.upper().replace("-", "_")
        value = os.environ.get(variable, default)
        parser.add_argument(f"--{name}", default=value, help=f"{text} [{variable}]")

    flag("namespaces", "", "namespaces to serve, comma-separated; empty: the whole cluster")
    flag("kubeconfig", os.environ.get("KUBECONFIG", ""), "kubeconfig file; empty: the pod's service account")
    flag("sidecar-image", "resumable-training/sidecar:latest", "image of the sidecar container")
    flag("sidecar-pull-policy", "", "imagePullPolicy of the sidecar; empty: Kubernetes' default")
    flag("sidecar-command", "", "command of the sidecar instead of its image's own (development)")
    flag("sidecar-cpu", "250m", "CPU that the sidecar requests")
    flag("sidecar-cpu-limit", "1", "CPU of the sidecar, request and limit, inside Guaranteed pods")
    flag("sidecar-memory", "512Mi", "memory of the sidecar without the shared volume's pages")
    flag("sidecar-user", "65532", "user id of the sidecar")
    flag("trainer-python", "python3", "Python of the trainer's image that runs rtj-launch")
    flag("store-endpoint", os.environ.get(ENV_STORE_ENDPOINT, ""), "S3 endpoint for jobs that name none")
    flag("store-region", os.environ.get(ENV_STORE_REGION, ""), "region for jobs that name none")
    flag("store-secret", "rtj-store", "Secret with store credentials for jobs that name none")
    flag("allowed-secrets", "rtj-store", "Secrets that jobs may name, comma-separated")
    flag("allowed-url-prefixes", "", "URL prefixes that jobs may use, comma-separated; empty: any")
    flag("allowed-endpoints", "", "endpoints that jobs may use, comma-separated; empty: any")
    flag("cluster-name", "", "name of this cluster in the journal, for people")
    flag("leader-lease", "", "namespace/name of the Lease that replicas share; empty: this is the only one")
    flag(
        "fault-key-file", "", "key that orders of fault drills are signed with; empty: no fault ever happens"
    )
    flag("metrics-port", "8080", "port of /metrics, /healthz and /readyz; 0: none")
    flag("workers", "8", "jobs that are reconciled at once")
    flag("log-level", "INFO", "DEBUG, INFO, WARNING or ERROR")
    flag("log-format", "text", "text or json")
    options = parser.parse_args(argv)
    if wrong := flags.problems(options, ENV_PREFIX):
        parser.error("; ".join(wrong))
    return options


async def run(options: argparse.Namespace) -> None:
    """Connect, wait for the CRD, start everything, and wait for a signal."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    kube = await connect(options.kubeconfig or None)
    observer = Observer(kube)
    runtime = build(options, kube, observer)
    drills = runtime.drills
    assert drills is not None, "`build` makes them"
    runner = await serve(runtime, int(options.metrics_port)) if int(options.metrics_port) else None
    supervisor = Supervisor(
        WatchOptions(_login(options.kubeconfig), LABEL_JOB, tuple(_words(options.namespaces))),
        on_job=runtime.job_changed,
        on_owned=runtime.owned_changed,
        on_restart=runtime.metrics.watch_restarts.inc,
        on_drill=drills.drill_changed,
    )
    elector = elector_of(options, kube)
    work = asyncio.create_task(lead(elector, kube, runtime, supervisor))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, stopped):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(supervisor.stop)
        if elector is not None:
            await elector.release(RELEASE_SECONDS)
        if runner is not None:
            await runner.cleanup()
        await observer.close()
        await kube.close()


def build(options: argparse.Namespace, kube: Kube, observer: Observer) -> Runtime:
    """All parts of the process, wired."""
    metrics = OperatorMetrics()
    settings = pod_settings(options)
    instance = f"operator/{os.environ.get('HOSTNAME') or socket.gethostname()}"
    turns = Turns(int(options.workers))
    applier = Applier(
        kube,
        settings,
        metrics,
        writer=instance,
        cluster=options.cluster_name,
        faults=Faults.from_env(),
        turns=turns,
        gate=FaultGate(kube, read_key(options.fault_key_file)),
    )
    defaults = OperatorDefaults(
        store_endpoint=options.store_endpoint or None,
        store_region=options.store_region or None,
        store_secret=options.store_secret,
        allowed_secrets=frozenset(_words(options.allowed_secrets)),
        allowed_url_prefixes=tuple(_words(options.allowed_url_prefixes)),
        allowed_endpoints=tuple(_words(options.allowed_endpoints)),
    )
    events = EventPoster(kube, instance)
    reconciler = Reconciler(
        kube,
        observer,
        applier,
        events,
        defaults,
        settings,
        metrics=metrics.jobs,
        first_look=FirstLook(applier.conflict_of),
    )
    namespaces = _words(options.namespaces)
    runtime = Runtime(kube, reconciler, observer.graves, metrics, namespaces, turns)
    looks = Turns(TURNS)
    steps = DrillSteps(kube, applier, events, defaults, settings, instance, options.cluster_name, looks)
    runtime.drills = DrillLoop(
        kube, DrillReconciler(steps), namespaces, lambda: runtime.leading(), looks, metrics.drills
    )
    return runtime


def pod_settings(options: argparse.Namespace) -> PodSettings:
    """Settings of the pods from the flags."""
    return PodSettings(
        sidecar_image=options.sidecar_image,
        sidecar_pull_policy=options.sidecar_pull_policy or None,
        sidecar_command=tuple(shlex.split(options.sidecar_command)),
        sidecar_cpu=options.sidecar_cpu,
        sidecar_cpu_limit=options.sidecar_cpu_limit,
        sidecar_memory=options.sidecar_memory,
        sidecar_user=int(options.sidecar_user),
        python=options.trainer_python,
    )


def elector_of(options: argparse.Namespace, kube: Kube) -> Elector | None:
    """The candidate for the Lease that the flag names; None without one."""
    if not options.leader_lease:
        return None
    namespace, _, name = options.leader_lease.partition("/")
    if not namespace or not name:
        raise ValueError(f"--leader-lease {options.leader_lease!r} must be namespace/name")
    host = os.environ.get("HOSTNAME") or socket.gethostname()
    return Elector(kube, namespace, name, f"{host}_{uuid.uuid4().hex[:12]}")


async def lead(elector: Elector | None, kube: Kube, runtime: Runtime, supervisor: Supervisor) -> None:
    """Work; with an elector only while it leads. Raises LostLeadership."""
    if elector is None:
        await _work(kube, runtime, supervisor)
        return
    runtime.standby, runtime.leading = True, lambda: elector.leading
    await elector.wait()
    runtime.standby = False
    lost: LostLeadership | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_work(kube, runtime, supervisor))
            tasks.create_task(elector.keep())
    except* LostLeadership as group:
        lost = next(exc for exc in group.exceptions if isinstance(exc, LostLeadership))
    if lost is not None:  # raised in there it would come out as a group
        raise lost


async def _work(kube: Kube, runtime: Runtime, supervisor: Supervisor) -> None:
    await _crd_lists(kube, runtime.namespaces)
    working = asyncio.create_task(runtime.run())
    await asyncio.sleep(0)  # the runtime takes events from its first turn on
    try:
        await runtime.sweep()  # before the watches list everything: what they bring then is known already
        supervisor.start()
        await working
    finally:
        working.cancel()


async def _crd_lists(kube: Kube, namespaces: Sequence[str], pause: float = 2.0) -> None:
    """Wait until the resource can be listed: watches that start earlier never see it (operator.md O22).

    In one namespace is enough: where a right is missing nothing can be done, and the others need not wait for it.
    """
    said: set[str] = set()
    while True:
        for namespace in namespaces or (None,):
            try:
                await kube.list(RTJ, namespace)
                return
            except KubeError as exc:
                sentence = missing_right(exc) or str(exc)
                if sentence not in said:
                    said.add(sentence)
                    log.warning("waiting until ResumableTrainingJobs can be listed: %s", sentence)
        await asyncio.sleep(pause)


def _login(kubeconfig: str) -> Any:
    """kopf's credentials, explicitly the same as ours."""
    if not kubeconfig:
        return kopf.login_with_service_account

    def login(**kwargs: Any) -> Any:
        os.environ["KUBECONFIG"] = kubeconfig
        return kopf.login_with_kubeconfig(**kwargs)

    return login


def _words(text: str) -> list[str]:
    return [w.strip() for w in text.split(",") if w.strip()]


class _JsonLines(logging.Formatter):
    """One JSON object per line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _log_to_stderr(level: str, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


if __name__ == "__main__":
    main()

"""From an empty machine to a verdict: control run, cluster, job, faults, evidence, proofs, picture, cleaning up."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence

from hack.demo import control, diagnosis, installation, interruptions, plot, proofs, report
from hack.demo.cluster import Cluster
from hack.demo.console import Console
from hack.demo.proofs import Evidence
from hack.demo.scenario import STORY, Scenario, Told
from hack.demo.settings import JOB, DemoError, Settings, parse
from hack.demo.timeline import Timeline, table
from hack.demo.watch import Seen, Watch
from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.open import open_store


def main(argv: list[str]) -> int:
    """Exit code: 0 when every proof holds."""
    settings = parse(argv, run_tag=time.strftime("%Y%m%d-%H%M%S"))
    console, cluster = Console(), Cluster()
    if settings.out.exists():
        shutil.rmtree(settings.out)
    settings.out.mkdir(parents=True)
    try:
        return _demo(settings, console, cluster)
    except DemoError as error:
        console.complain(f"\ndemo: {error}")
        return 1


def _demo(settings: Settings, console: Console, cluster: Cluster) -> int:
    console.section("Control run: rtj run, 4 ranks, never interrupted")
    reference = control.train(settings)
    console.say(
        f"control run finished: {reference.history.last_step} steps, log in {settings.control / 'log.txt'}"
    )
    console.section("Cluster and operator")
    fresh = installation.start_cluster(cluster, console)
    try:
        installation.load_images(cluster, console)
        installation.make_bucket(cluster)
        installation.install_operator(cluster, console)
        told, seen = _play(settings, console, cluster)
        run = _collect(settings, cluster)
        return _conclude(settings, console, told, seen, run, reference)
    except DemoError:
        diagnosis.collect(cluster, settings, console)
        raise
    finally:
        _clean_up(settings, console, cluster, fresh)


def _play(settings: Settings, console: Console, cluster: Cluster) -> tuple[Told, Seen]:
    console.section("The job and its faults")
    installation.remove_job(cluster, settings)
    watch = Watch(cluster.variables["KUBECONFIG"], settings.namespace, JOB, settings.out / "status.jsonl")
    installation.apply_job(cluster, settings)
    console.say(f"job {settings.namespace}/{JOB} applied: 2 pods x 2 ranks, elastic 1 to 2 nodes")
    watch.start()
    try:
        return Scenario(cluster, watch, settings, console).play(), watch.seen
    finally:
        watch.stop()


def _collect(settings: Settings, cluster: Cluster) -> Evidence:
    variables = cluster.variables
    os.environ.update({name: variables[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")})
    store = open_store(settings.store_url, endpoint=cluster.host_s3_endpoint, region=variables["AWS_REGION"])
    try:
        return proofs.collect(store, RunKeys(settings.namespace, JOB), settings.ledger)
    finally:
        store.close()


def _conclude(
    settings: Settings, console: Console, told: Told, seen: Seen, run: Evidence, reference: Evidence
) -> int:
    timelines = _timelines(told, seen, run)
    proven = [
        _prove_in_place(told),
        *proofs.prove_all(
            run, reference, seen.reports, STORY,
            samples=proofs.dataset_size(), tolerance=settings.loss_tolerance, steps=settings.steps,
        ),
    ]  # fmt: skip
    borders = [stretch.start + 1 for stretch in run.history.stretches if stretch.attempt.restore]
    _print(console, seen, run, reference, timelines, proven, borders)
    plot.draw(
        settings.out / "loss.png",
        run.curve,
        reference.curve,
        bands(run, told),
        tolerance=settings.loss_tolerance,
    )
    report.write_json(
        settings.out / "report.json", run=run, control=reference, timelines=timelines, proofs=proven,
        reports=seen.reports, seconds=console.seconds,
    )  # fmt: skip
    failed = [proof.name for proof in proven if not proof.holds]
    console.say(f"written: {settings.out / 'loss.png'}, {settings.out / 'report.json'}")
    console.say(f"NOT proven: {', '.join(failed)}" if failed else f"all {len(proven)} proofs hold")
    return 1 if failed else 0


def _timelines(told: Told, seen: Seen, run: Evidence) -> list[Timeline]:
    build = (interruptions.failure_in_place, interruptions.node_loss, interruptions.growth)
    resumed = run.attempts[1:4]
    return [
        make(fault.name, fault.time, attempt, seen, run.ledgers)
        for make, fault, attempt in zip(build, told.faults, resumed, strict=False)
    ]


def _prove_in_place(told: Told) -> Proof:
    wrong = [] if told.relaunched_in_place else ["the pods were replaced after a rank had been killed"]
    return Proof("relaunched in place", "the killed rank's pods are the same ones", {}, wrong)


def _print(
    console: Console,
    seen: Seen,
    run: Evidence,
    reference: Evidence,
    timelines: Sequence[Timeline],
    proven: Sequence[Proof],
    borders: Sequence[int],
) -> None:
    console.section("From fault to the first step after it")
    console.block(report.render(table(timelines)))
    console.section("Attempts")
    console.block(report.render(report.attempts_table(run, seen.attempts)))
    console.section("What each resume checked before it trained")
    console.block(report.render(report.checks_table(seen.reports)))
    console.section("Loss at the same steps")
    console.block(report.render(report.losses_table(run.curve, reference.curve, borders)))
    console.section("Proofs, from what the ranks logged and from the journal")
    console.block(report.proof_lines(proven))


def bands(run: Evidence, told: Told) -> list[plot.Band]:
    """The attempts for the picture."""
    events = ["", *(fault.name for fault in told.faults)]
    found = []
    for stretch in run.history.stretches:
        topology = stretch.attempt.topology
        number = stretch.attempt.attempt
        lost = {
            r.step: r.loss for r in run.ledgers.of_epoch(stretch.epoch) if r.step > stretch.end and r.loss
        }
        found.append(
            plot.Band(
                title=f"attempt {number}",
                size=f"{topology.mesh.world_size} GPUs",
                mesh=f"dp {topology.mesh.dp} × micro batch {topology.batch.micro_batch_size} "
                f"× accumulation {topology.batch.accumulation}",
                event=events[number - 1] if number <= len(events) else "",
                start=stretch.start,
                end=stretch.end,
                lost=lost,
            )
        )
    return found


def _clean_up(settings: Settings, console: Console, cluster: Cluster, fresh: bool) -> None:
    if settings.keep:
        console.say("--keep: job and cluster are left as they are; `make cluster-down` stops them")
        return
    try:
        for node in ("1", "2"):
            cluster.tool("node", "heal", node)
        installation.remove_job(cluster, settings)
        if fresh:
            cluster.tool("down")
            console.say("cluster stopped")
    except DemoError as error:
        console.complain(f"demo: cleaning up: {error}")

"""From an empty machine to a verdict: control run, cluster, job, faults, evidence, proofs, picture, cleaning up."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from hack.demo import diagnosis, plot, proofs, report
from hack.demo.arguments import parse
from hack.demo.console import Console
from hack.demo.local_place import LocalPlace
from hack.demo.out_folder import PREVIOUS, claimed, drop_previous, make_anew
from hack.demo.own_place import OwnPlace
from hack.demo.own_settings import OwnSettings
from hack.demo.place import Place
from hack.demo.proofs import Evidence
from hack.demo.scenario import Scenario, Told
from hack.demo.settings import JOB, DemoError, LostError, Settings, new_tag
from hack.demo.timeline import Timeline, table
from hack.demo.watch import Seen
from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.kube_commands.drill import sigterm_interrupts

INTERRUPTED = 130
LEFT = 1
"""All is proven, but something was left that a person has to take away."""


def main(argv: list[str]) -> int:
    """Exit code: 0 when every proof holds and all is taken away; 130 after Ctrl-C or SIGTERM, which clean up, too."""
    settings = parse(argv, run_tag=new_tag())
    console = Console()
    place: Place = OwnPlace(settings) if isinstance(settings, OwnSettings) else LocalPlace(settings)
    try:
        with claimed(settings.out), sigterm_interrupts():
            return _demo(settings, console, place)
    except DemoError as error:
        console.complain(f"\ndemo: {error}")
        return 1
    except KeyboardInterrupt:
        console.complain("\ndemo: interrupted")
        return INTERRUPTED


def _demo(settings: Settings, console: Console, place: Place) -> int:
    tidy = True
    try:
        place.check(console)
        if make_anew(settings.out):
            console.say(
                f"the report of the run before is in {settings.out / PREVIOUS} until there is a new one"
            )
        reference = place.prepare(console)
        scenario, told, seen = _play(settings, console, place)
        run = place.evidence()
        code = _conclude(settings, console, place, scenario, told, seen, run, reference)
        drop_previous(settings.out)
    except DemoError as error:
        if place.up and not isinstance(error, LostError):
            diagnosis.collect(place, settings, console)
        raise
    finally:
        if place.up:
            tidy = _clean_up(console, place)
    return code if tidy else max(code, LEFT)


def _play(settings: Settings, console: Console, place: Place) -> tuple[Scenario, Told, Seen]:
    console.section("The job and its faults")
    watch = place.watch(settings.out / "status.jsonl")
    scenario = place.scenario(watch, console)
    place.apply_job()
    console.say(
        f"job {settings.namespace}/{JOB} applied: 2 pods x {settings.ranks} ranks, elastic 1 to 2 nodes"
    )
    watch.start()
    try:
        return scenario, scenario.play(), watch.seen
    finally:
        watch.stop()


def _conclude(
    settings: Settings,
    console: Console,
    place: Place,
    scenario: Scenario,
    told: Told,
    seen: Seen,
    run: Evidence,
    reference: Evidence,
) -> int:
    timelines = _timelines(scenario, told, seen, run)
    proven = [
        _prove_in_place(told),
        *proofs.prove_all(
            run, reference, seen.reports, scenario.story,
            samples=place.dataset_size(), tolerance=settings.loss_tolerance, steps=settings.steps,
        ),
    ]  # fmt: skip
    borders = [stretch.start + 1 for stretch in run.history.stretches if stretch.attempt.restore]
    _print(console, seen, run, reference, timelines, proven, borders)
    plot.draw(
        settings.out / "loss.png",
        run.curve,
        reference.curve,
        bands(run, told, settings.rank_word),
        tolerance=settings.loss_tolerance,
        through=scenario.through,
    )
    report.write_json(
        settings.out / "report.json", run=run, control=reference, timelines=timelines, proofs=proven,
        reports=seen.reports, seconds=console.seconds,
    )  # fmt: skip
    failed = [proof.name for proof in proven if not proof.holds]
    console.say(f"written: {settings.out / 'loss.png'}, {settings.out / 'report.json'}")
    console.say(f"NOT proven: {', '.join(failed)}" if failed else f"all {len(proven)} proofs hold")
    return 1 if failed else 0


def _timelines(scenario: Scenario, told: Told, seen: Seen, run: Evidence) -> list[Timeline]:
    return [
        make(fault.name, fault.time, attempt, seen, run.ledgers)
        for make, fault, attempt in zip(scenario.timings, told.faults, run.attempts[1:], strict=False)
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


def bands(run: Evidence, told: Told, rank_word: str) -> list[plot.Band]:
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
                size=f"{topology.mesh.world_size} {rank_word}",
                mesh=f"dp {topology.mesh.dp} × micro batch {topology.batch.micro_batch_size} "
                f"× accumulation {topology.batch.accumulation}",
                event=events[number - 1] if number <= len(events) else "",
                start=stretch.start,
                end=stretch.end,
                lost=lost,
            )
        )
    return found


def _clean_up(console: Console, place: Place) -> bool:
    """Whether nothing is left. A second SIGTERM, as of make and its group, does not break it off; Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        place.clean_up(console)
    except DemoError as error:
        console.complain(f"demo: cleaning up: {error}")
        return False
    finally:
        signal.signal(signal.SIGTERM, before)
    return True

"""Saves and restores of one machine against what bounds them: memcpy, raw S3 transfers, and what others do.

Every figure is a ratio of two things measured by turns in one run, the median of at least five rounds: machines are
noisy, ratios less so. The store is a real S3 server on loopback with its data in memory; trainer and sidecar are real
processes under `rtj run`; every save that counts is looked up in the journal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

from figures import Figure, NotMeasured, ratio, spread

from datapath import fetched, large_scale, missing, processes
from datapath.peer_process import PackagePeers
from datapath.raw import Bucket
from datapath.servers import Throttle, server
from datapath.training_run import Fact, TrainingRun, column

_MB = 10**6
_SLOW = 100 * _MB
"""Bytes per second of the store that is throttled: a busy 1 Gbit/s link."""
Row = Figure | NotMeasured


def measure(options: argparse.Namespace) -> Iterable[Row]:
    """All rows, as they come."""
    rounds, quick = max(5, options.rounds), options.quick
    if quick:
        rounds = 5
    with server() as (store, pid):
        large = TrainingRun(store, "bench-large", options.megabytes * _MB, 12, pid)
        yield from _saves(
            "large tensors", large.act("saves", *([] if quick else ["lost"]), rounds=rounds, dcp=True)
        )
        yield from _restores("large tensors", large, 5, packages=not quick)
        small = TrainingRun(store, "bench-small", 16 * _MB, 1000, pid)
        facts = small.act("idle", "saves", rounds=rounds, dcp=True)
        yield from _steps(facts)
        yield from _saves("small tensors", facts)
        if not quick:
            two = TrainingRun(store, "bench-two", options.megabytes * _MB, 12, pid, ranks=2)
            yield from _two_ranks(two.act("idle", "together", rounds=rounds, idle=60))
            yield from _restores("small tensors", small, 5)
            yield from _sizes(store, pid)
            yield from _peers(large.act("peers", rounds=5))
            yield from _meshes(store, options.megabytes * _MB)
            yield from _throttled(store, pid)
            yield from _many(store, pid)
    starts = processes.sidecar_starts(5)
    seconds, cpu = [s.seconds for s in starts], median(s.cpu for s in starts)
    yield Figure(
        "datapath: start of the sidecar", median(seconds), "s", 0.5, spread(seconds), f"CPU {cpu:.2f} s"
    )
    for before, now in ((8, 6), (64, 48)):
        name = f"datapath: computed: 7B, {before} → {now} ranks: bytes fetched ÷ needed, worst pod"
        yield Figure(name, fetched.worst_pod(before, now), "×", 1.05)
    yield from large_scale.measure(256 if quick else 1024)
    yield from missing.rows(quick=quick)


def _saves(label: str, facts: list[Fact]) -> Iterator[Row]:
    """What one rank's saves cost."""
    name = f"datapath: {label}"
    memcpy, blocking = column(facts, "save", "memcpy"), column(facts, "save", "blocking")
    seconds, raw = column(facts, "save", "seconds"), column(facts, "save", "raw")
    first = next(f for f in facts if f["kind"] == "save")
    small = first["bytes"] / first["tensors"] < 32 * 1024
    peer = median(d / m for d, m in zip(column(facts, "save", "dcp"), memcpy, strict=True))
    title = f"{name}: blocking of a warm save ÷ memcpy"
    yield ratio(title, blocking, memcpy, 1.5 if small else 1.15, f"DCP async_save {peer:.3g}×")
    yield Figure(
        f"{name}: blocking of the first save ÷ memcpy",
        first["blocking"] / median(memcpy),
        "×",
        1.3,
        "n=1",
        f"DCP async_save {first['dcp'] / median(memcpy):.3g}×",
    )
    rates = f"{first['bytes'] / median(seconds) / _MB:.0f} MB/s, raw {first['bytes'] / median(raw) / _MB:.0f} MB/s"
    title = f"{name}: save, step's end to commit ÷ raw multipart with SHA-256"
    yield ratio(title, seconds, raw, 1 / 0.9, rates)
    if not small:
        cpu, raw_cpu = column(facts, "save", "cpu"), column(facts, "save", "raw_cpu")
        per = f"{median(cpu) / first['bytes'] * 1e9:.2f} s, raw {median(raw_cpu) / first['bytes'] * 1e9:.2f} s per GB"
        yield ratio(f"{name}: CPU of a save ÷ raw multipart with SHA-256", cpu, raw_cpu, 1.2, per)
        volume, size = column(facts, "save", "volume"), [first["bytes"]] * len(seconds)
        beside = "the sidecar sends from there, without a copy"
        yield ratio(
            f"{name}: memory of the shared volume ÷ bytes that the pod writes", volume, size, 1.1, beside
        )
    lost = column(facts, "lost", "lost", warm=False)
    if lost:
        step = median(column(facts, "lost", "step", warm=False))
        beside = f"steps of {step * 1e3:.0f} ms, store beside the sidecar"
        title = f"{name}: steps lost per save, sidecar on another core"
        yield Figure(title, median(lost), "steps", 0.5, spread(lost), beside)


def _sizes(store: Bucket, pid: int) -> Iterator[Row]:
    """From a megabyte to what the memory of a small machine allows."""
    for megabytes, tensors in ((1, 8), (1024, 48)):
        run = TrainingRun(store, f"bench-size-{megabytes}", megabytes * _MB, tensors, pid)
        facts = run.act("saves", rounds=5)
        memcpy, blocking = column(facts, "save", "memcpy"), column(facts, "save", "blocking")
        seconds, raw = column(facts, "save", "seconds"), column(facts, "save", "raw")
        title = f"datapath: {megabytes} MB: blocking of a warm save ÷ memcpy"
        yield ratio(title, blocking, memcpy, 1.15, f"{median(blocking) * 1e3:.2f} ms")
        title = f"datapath: {megabytes} MB: save, step's end to commit ÷ raw multipart with SHA-256"
        yield ratio(title, seconds, raw, 1 / 0.9, f"{median(seconds) * 1e3:.0f} ms")


def _steps(facts: list[Fact]) -> Iterator[Row]:
    """What a step's end costs without a save, on one rank."""
    (idle,) = (f for f in facts if f["kind"] == "idle")
    own = [max(0.0, fed - plain) for fed, plain in zip(idle["fed"], idle["plain"], strict=True)]
    beside = f"and {median(own) * 1e6:.0f} µs with the next batch"
    end = [e * 1e6 for e in idle["end"]]
    yield Figure("datapath: step end without a save, 1 rank", median(end), "µs", 20, spread(end), beside)


def _two_ranks(facts: list[Fact]) -> Iterator[Row]:
    memcpy, blocking = column(facts, "together", "memcpy"), column(facts, "together", "blocking")
    title = "datapath: 2 ranks: blocking of a warm save ÷ memcpy by both at once"
    yield ratio(title, blocking, memcpy, 1.15)
    own = [
        end + max(0.0, fed - plain)
        for f in facts
        if f["kind"] == "idle"
        for end, fed, plain in zip(f["end"], f["fed"], f["plain"], strict=True)
    ]
    micro = [o * 1e6 for o in own]
    title = "datapath: step end and agreement without a save, 2 ranks ÷ a step of 100 ms"
    yield Figure(title, median(own) / 0.1 * 100, "%", 0.5, f"{spread(micro)} µs")


def _meshes(store: Bucket, size: int) -> Iterator[Row]:
    """Restores of shards of one mesh into another, and into the same one, by turns. The slowest rank counts."""
    for was, tp, others in ((4, 1, (3, 2)), (4, 2, (4,))):
        saved = TrainingRun(store, f"bench-mesh-{tp}", size, 12, ranks=was, tp=tp, sharded=True)
        saved.act("reshard")
        taken: dict[int, list[float]] = {now: [] for now in (0, *others)}
        for _ in range(5):
            for now, seconds in taken.items():
                run = replace(saved, ranks=now, tp=1) if now else saved
                seconds.append(max(column(run.act("reshard"), "reshard", "seconds", warm=False)))
        for now in others:
            names = (f"dp{was // tp}×tp{tp}" if tp > 1 else f"{was}"), (f"dp{now}" if tp > 1 else f"{now}")
            beside = f"{median(taken[now]):.2f} s, same mesh {median(taken[0]):.2f} s"
            title = f"datapath: restore {' → '.join(names)} ranks ÷ same mesh"
            yield ratio(title, taken[now], taken[0], 1.3, beside)


def _by_turns(run: TrainingRun, rounds: int, packages: bool) -> tuple[list[Fact], dict[str, list[float]]]:
    """Restores, and loads of the same bytes by what others do."""
    if not packages:
        return [run.act("restore", round=i)[0] for i in range(rounds)], {}
    facts, loads = [], {name: list[float]() for name in PackagePeers.LOADS}
    with PackagePeers(run.store, size=run.bytes, tensors=run.tensors) as others:
        for name in loads:
            others.save_seconds(name)
            others.load_seconds(name)  # imports and connections
        for i in range(rounds):
            facts.append(run.act("restore", round=i)[0])
            for name, seconds in loads.items():
                seconds.append(others.load_seconds(name))
    return facts, loads


def _restores(label: str, run: TrainingRun, rounds: int, *, packages: bool = False) -> Iterator[Row]:
    """Restores into fresh processes, before and after a raw download by turns."""
    facts, loads = _by_turns(run, rounds, packages)
    seconds, raw = (
        column(facts, "restore", "seconds", warm=False),
        column(facts, "restore", "raw", warm=False),
    )
    rates = f"{run.bytes / median(seconds) / _MB:.0f} MB/s, raw {run.bytes / median(raw) / _MB:.0f} MB/s; "
    phases = {p: median(f["phases"][p] for f in facts) for p in facts[0]["phases"] if p != "total"}
    phases["rest"] = median(seconds) - sum(phases.values())
    rates += ", ".join(f"{p} {s * 1e3:.0f} ms" for p, s in phases.items())
    title = f"datapath: {label}: restore with verification ÷ raw ranged GET with SHA-256"
    yield ratio(title, seconds, raw, 1 / 0.85, rates)
    for name, theirs in loads.items():
        beside = f"{run.bytes / median(theirs) / _MB:.0f} MB/s, unverified"
        yield ratio(
            f"datapath: {label}: restore with verification ÷ load of {name}", seconds, theirs, 1.0, beside
        )
    starts = {part: median(f["start"][part] for f in facts) for part in facts[0]["start"]}
    parts = ", ".join(f"{part} {s:.2f} s" for part, s in starts.items())
    title = f"datapath: {label}: start of a rank to its first step"
    yield Figure(title, sum(starts.values()), "s", None, f"n={rounds}", parts)


def _peers(facts: list[Fact]) -> Iterator[Row]:
    """The same bytes in the store by what others do."""
    ours = column(facts, "peers", "seconds", warm=False)
    for name in facts[0]["times"]:
        theirs = [f["times"][name] for f in facts]
        target = 1 / 1.2 if name == "s3torchconnector" else 1.0
        yield ratio(f"datapath: large tensors: save, step's end to commit ÷ {name}", ours, theirs, target)


def _throttled(store: Bucket, pid: int) -> Iterator[Row]:
    """The same over a link as there are: what the machine computes hides behind it, or does not."""
    with Throttle(store.endpoint, _SLOW) as link:
        slow = Bucket(link.endpoint, store.access, store.secret)
        label = f"store throttled to {_SLOW / _MB:.0f} MB/s"
        run = TrainingRun(slow, "bench-slow", 64 * _MB, 12, pid)
        facts = run.act("saves", rounds=5)
        seconds, raw = column(facts, "save", "seconds"), column(facts, "save", "raw")
        title = f"datapath: {label}: save, step's end to commit ÷ raw multipart with SHA-256"
        yield ratio(title, seconds, raw, 1 / 0.9)
        yield from _restores(label, run, 5)


def _many(store: Bucket, pid: int) -> Iterator[Row]:
    """Two hundred saves: memory of the sidecar; and what frozen weights cost after the first."""
    run = TrainingRun(store, "bench-many", 1 * _MB, 20, pid, frozen=32 * _MB, optimizer="Adam")
    facts = run.act("many", rounds=200)
    resident = column(facts, "many", "resident", warm=False)
    grown = max(resident[20:]) / resident[20]
    beside = f"{resident[20] / 2**20:.0f} MiB after 20, {resident[-1] / 2**20:.0f} MiB at the end"
    yield Figure("datapath: memory of the sidecar over 200 saves ÷ after 20", grown, "×", 1.05, "", beside)
    committed = run.committed_bytes()
    stored = [committed[f["checkpoint"]] for f in facts if f["round"]]
    state = column(facts, "many", "state")
    title = "datapath: LoRA: bytes per save after the first ÷ trainable state and its moments"
    yield ratio(title, stored, state, 1.05, f"{run.frozen / _MB:.0f} MB are frozen")

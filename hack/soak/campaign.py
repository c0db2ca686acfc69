"""Many schedules one after the other, and the tally that says what they have seen."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hack.soak.audit import Verdict, audit
from hack.soak.chance import draw
from hack.soak.server import BUCKET, Server
from hack.soak.story import Story, StuckError
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.fence_errors import FenceError
from trainer_sidecar.store.open import open_store

_EVERY = 50


class Campaign:
    """`count` schedules from seed `first` on. A failed one's files are kept in `out` (default: a temporary folder)."""

    def __init__(self, count: int, first: int, out: Path | None, *, quiet: bool = False) -> None:
        self._count, self._first, self._out, self._quiet = count, first, out, quiet
        self._tally: Counter[str] = Counter()
        self._points: Counter[str] = Counter()
        self._failed: list[str] = []

    def run(self) -> int:
        """Exit code."""
        root = Path(tempfile.mkdtemp(prefix="rtj-soak-"))
        server = Server(root)
        began = time.monotonic()
        try:
            server.start()
            os.environ.update(server.environment())
            own, fresh = self._open(server), self._open(server)
            for seed in range(self._first, self._first + self._count):
                self._one(seed, root, own, fresh)
        finally:
            server.stop()
            self._tell(time.monotonic() - began)
            shutil.rmtree(root, ignore_errors=True)
        return 1 if self._failed else 0

    def _open(self, server: Server) -> Store:
        return open_store(f"s3://{BUCKET}", endpoint=server.endpoint, region="us-east-1")

    def _one(self, seed: int, root: Path, own: Store, fresh: Store) -> None:
        schedule = draw(seed)
        folder = root / f"seed-{seed}"
        folder.mkdir()
        story = Story(schedule, folder, own, fresh)
        verdict = Verdict()
        try:
            told = story.run()
        except StuckError as exc:
            told = story.told
            self._tally["stuck"] += 1
            self._fail(seed, folder, [f"stuck: {exc}"])
        except (
            FenceError
        ) as exc:  # every attempt of a schedule has a restore point to find, or may start afresh
            told = story.told
            verdict.wrong.append(f"an attempt was refused: {exc}")
            self._fail(seed, folder, verdict.wrong)
        else:
            verdict = audit(own, story.keys, told)
            if not verdict.good:
                self._fail(seed, folder, [*verdict.wrong, *verdict.lost])
        self._tally.update(told.killed)
        if told.crashed:
            self._points[told.crashed] += 1
        self._count_in(verdict)
        self._tally["fences"] += len(told.fences)
        self._tally["zombie placements"] += schedule.new_placement
        self._tally["schedules"] += 1
        shutil.rmtree(folder, ignore_errors=True)
        if not self._quiet and self._tally["schedules"] % _EVERY == 0:
            self._say(f"{self._tally['schedules']} of {self._count}, {len(self._failed)} failed")

    def _count_in(self, verdict: Verdict) -> None:
        for name in ("commits", "verified", "bytes", "retired", "told"):
            self._tally[name] += getattr(verdict, name)
        self._tally["wrong"] += len(verdict.wrong)
        self._tally["lost"] += len(verdict.lost)

    def _fail(self, seed: int, folder: Path, sentences: list[str]) -> None:
        kept = (self._out or Path(tempfile.gettempdir()) / "rtj-soak-failed") / f"seed-{seed}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("*.sock", ".sock*", "restore"))
        self._failed += [
            f"seed {seed}: {s} (files: {kept}; again: --seed {seed} --schedules 1)" for s in sentences
        ]
        self._say(self._failed[-1])

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _tell(self, seconds: float) -> None:
        t = self._tally
        done = max(1, t["schedules"])
        print(
            f"{t['schedules']} schedules in {seconds:.0f} s ({seconds / done:.2f} s each), seeds {self._first} to "
            f"{self._first + t['schedules'] - 1}\n"
            f"  killed: {t['coordinators']} coordinators, {t['sidecars']} other sidecars, {t['ranks']} ranks; "
            f"{sum(self._points.values())} coordinators at named points: "
            f"{', '.join(f'{name} {n}' for name, n in sorted(self._points.items())) or 'none'}\n"
            f"  fenced: {t['fences']} attempts, {t['zombie placements']} of them with the old pods still alive\n"
            f"  commits: {t['commits']}, of them {t['retired']} retired; {t['told']} outcomes told to ranks\n"
            f"  verified: {t['verified']} checkpoints, {t['bytes'] / 1e6:.1f} MB, every byte\n"
            f"  wrong restore points: {t['wrong']}\n"
            f"  lost commits: {t['lost']}\n"
            f"  stuck: {t['stuck']}"
        )
        for sentence in self._failed:
            print(f"  {sentence}")

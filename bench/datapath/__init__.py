"""Saves and restores of one machine against what bounds them: memcpy, raw S3 transfers, and torch's own DCP.

Every figure is a ratio of two things measured by turns in one run, the median of several: machines are noisy, ratios
less so. The store is a real S3 server on loopback; trainer and sidecar are real processes under `rtj run`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from figures import Figure, spread

from datapath import large_scale, raw

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("trainer.py")


def measure(options: argparse.Namespace) -> Iterable[Figure]:
    """All figures, as they come."""
    with TemporaryDirectory(prefix="rtj-bench-") as folder, raw.server(Path(folder)) as store:
        for label, tensors, size in (("large tensors", 12, options.megabytes), ("small tensors", 1000, 16)):
            yield from _saves(label, tensors, size, options.rounds, store, Path(folder))
    yield from large_scale.measure()


def _saves(
    label: str, tensors: int, megabytes: int, rounds: int, store: raw.Bucket, folder: Path
) -> Iterable[Figure]:
    """One model: trained, saved `rounds` times, and resumed."""
    out = folder / f"{tensors}.jsonl"
    environment = {
        **os.environ,
        "BENCH_OUT": str(out),
        "BENCH_TENSORS": str(tensors),
        "BENCH_BYTES": str(megabytes * 10**6),
        "BENCH_ROUNDS": str(rounds),
        "BENCH_DCP": str(folder / f"dcp-{tensors}"),
        "OMP_NUM_THREADS": "1",
        **store.environment,
    }
    command = [
        sys.executable,
        "-m",
        "trainer_sidecar.cli",
        "run",
        "--store",
        store.url,
        "--endpoint",
        store.endpoint,
    ]
    command += ["--run-id", f"bench-{tensors}", "--interval-steps", "0", "--interval-seconds", "0"]
    for resume in (False, True):
        steps = "2" if resume else "0"
        done = subprocess.run(
            [*command, "--", str(SCRIPT)],
            env={**environment, "BENCH_MORE_STEPS": steps},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{label}: rtj run ended with {done.returncode}: {done.stderr[-3000:]}")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    yield from _figures(label, found, store)


def _figures(label: str, found: list[dict[str, Any]], store: raw.Bucket) -> Iterable[Figure]:
    rounds = [f for f in found if f["kind"] == "save"]
    first, warm = rounds[0], rounds[1:]
    name = label.replace(" ", "-")
    small = first["bytes"] / first["tensors"] < 32 * 1024

    def ratios(over: str, under: str) -> list[float]:
        return [r[over] / r[under] for r in warm]

    blocking, peer = ratios("blocking", "memcpy"), ratios("dcp_blocking", "memcpy")
    yield Figure(
        f"{name}/blocking of a warm save ÷ memcpy",
        median(blocking),
        "×",
        1.5 if small else 1.15,
        spread(blocking),
        f"DCP async_save {median(peer):.3g}×",
    )
    yield Figure(
        f"{name}/blocking of the first save ÷ memcpy",
        first["blocking"] / first["memcpy"],
        "×",
        1.3,
        "",
        f"DCP async_save {first['dcp_blocking'] / first['memcpy']:.3g}×",
    )
    # Rates of three transfers of the same bytes: ours, raw, ours ... the raw one is measured by turns, too.
    uploads = [store.upload_seconds(first["bytes"]) for _ in warm]
    committed = [r["committed"] for r in warm]
    yield Figure(
        f"{name}/raw upload with SHA-256 ÷ save end to end",
        median(committed) / median(uploads),
        "×",
        1 / 0.9,
        f"save {spread(committed)} s, raw {spread(uploads)} s",
        f"{first['bytes'] / median(committed) / 1e6:.0f} MB/s, raw {first['bytes'] / median(uploads) / 1e6:.0f} MB/s",
    )
    restored = next(f for f in found if f["kind"] == "restore")
    downloads = [store.download_seconds(first["bytes"]) for _ in range(3)]
    yield Figure(
        f"{name}/restore with verification ÷ raw ranged GET with SHA-256",
        restored["seconds"] / median(downloads),
        "×",
        1 / 0.85,
        f"raw {spread(downloads)} s",
        f"{first['bytes'] / restored['seconds'] / 1e6:.0f} MB/s",
    )
    yield Figure(f"{name}/step end without a save", first["step_end"] * 1e6, "µs", 20)

"""What a demo run is told and where it puts things; everything that could differ between two runs stands here."""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pretrain"
CHART = ROOT / "charts" / "rtj-operator"
OVERLAY = Path(__file__).with_name("kustomize")

JOB = "pretrain"
SYSTEM_NAMESPACE = "rtj-system"
RELEASE = "rtj"
OPERATOR_IMAGE = "localhost/rtj-operator:dev"
SIDECAR_IMAGE = "localhost/rtj-sidecar:dev"
TRAINER_IMAGE = "localhost/rtj-base:dev"
BUCKET = "checkpoints"


class DemoError(Exception):
    """The demo cannot go on; the message says what was expected, what was seen, and where to look."""


@dataclass(frozen=True)
class Settings:
    """One demo run."""

    out: Path
    namespace: str = "rtj-demo"
    steps: int = 240
    interval_steps: int = 15
    cut_pod: int = 1
    keep: bool = False
    loss_tolerance: float = 1e-5
    """Relative; the order of additions is all that may differ between meshes."""

    @property
    def ledger(self) -> Path:
        """Where the ranks of the cluster write their ledgers."""
        return self.out / "ledger"

    @property
    def control(self) -> Path:
        """Store, ledgers and log of the control run."""
        return self.out / "control"

    @property
    def overlay(self) -> Path:
        """The kustomize overlay with this machine's folders in it."""
        return self.out / "overlay"

    @property
    def diagnosis(self) -> Path:
        """What is collected when something fails."""
        return self.out / "diagnosis"

    @property
    def store_url(self) -> str:
        """A prefix of its own for every run: a journal is never started anew."""
        return f"s3://{BUCKET}/{self.out.name}-{self.run_tag}"

    run_tag: str = "0"


def libraries() -> Path:
    """Folder of this machine's shared libraries."""
    return Path("/usr/lib") / f"{platform.machine()}-linux-gnu"


def python_home() -> Path:
    """Folder of the interpreter behind the virtual environment."""
    return Path(sys.base_prefix).resolve()


def parse(argv: list[str], run_tag: str) -> Settings:
    """Settings from the command line; exits with usage on an error."""
    parser = argparse.ArgumentParser(
        prog="make demo ARGS=...", description="Lose a rank, then a node; go on with fewer GPUs; prove it."
    )
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps of both runs")
    parser.add_argument(
        "--interval-steps", type=int, default=Settings.interval_steps, help="steps between saves"
    )
    parser.add_argument(
        "--cut-pod", type=int, choices=[0, 1], default=Settings.cut_pod,
        help="index of the pod whose node is cut off; pod 0 is the coordinator and hosts the rendezvous",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave job and cluster running")
    parser.add_argument("--namespace", default=Settings.namespace, help="namespace of the job")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="folder for what the demo writes")
    given = parser.parse_args(argv)
    if given.steps < 8 * given.interval_steps:
        parser.error(
            f"--steps {given.steps} leaves no room for two faults: use at least {8 * given.interval_steps}"
        )
    return Settings(
        out=given.out.resolve(),
        namespace=given.namespace,
        steps=given.steps,
        interval_steps=given.interval_steps,
        cut_pod=given.cut_pod,
        keep=given.keep,
        run_tag=run_tag,
    )

"""What a demo run is told and where it puts things; everything that could differ between two runs stands here."""

from __future__ import annotations

import platform
import re
import secrets
import sys
import time
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


class LostError(DemoError):
    """What the demo worked on is another's by now, or gone: the message says whose. There is nothing to look at."""


@dataclass(frozen=True)
class Settings:
    """One demo run."""

    out: Path
    namespace: str = "rtj-demo"
    steps: int = 240
    interval_steps: int = 15
    cut_pod: int = 1
    keep: bool = False
    ranks: int = 2
    """Of each pod."""
    loss_tolerance: float = 1e-5
    """Relative; the order of additions is all that may differ between meshes."""

    @property
    def rank_word(self) -> str:
        """What a rank runs on, in the plural."""
        return "GPUs"

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
        """A prefix of its own for every run: a journal is never started anew. Not all that a folder may be called is
        taken there."""
        return f"s3://{BUCKET}/{re.sub(r'[^A-Za-z0-9._=-]', '-', self.out.name)}-{self.run_tag}"

    run_tag: str = "0"


def new_tag() -> str:
    """A tag that no other run has, not even one that starts in the same second: `20261130-213915-5f3c0a91`. It is the
    value of a label, so at most 63 characters; it sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def libraries() -> Path:
    """Folder of this machine's shared libraries."""
    return Path("/usr/lib") / f"{platform.machine()}-linux-gnu"


def python_home() -> Path:
    """Folder of the interpreter behind the virtual environment."""
    return Path(sys.base_prefix).resolve()

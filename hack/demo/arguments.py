"""The command line of the demo: what every demo is told, and what only one on a cluster of one's own is."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from urllib.parse import urlsplit

from hack.demo import own_rules
from hack.demo.out_folder import DEFAULT
from hack.demo.own_settings import CREDENTIALS, OwnSettings
from hack.demo.settings import Settings
from trainer_sidecar import __version__

GPU_INTERVAL_STEPS = 200
"""Steps of the example take milliseconds on a GPU: a demo must be able to act between two saves."""
GPU_LOSS_TOLERANCE = 0.02
"""bfloat16 has eight bits of precision, and another mesh adds in another order."""
CPU_RANKS = 2
_OWN = ("store", "endpoint", "endpoint_here", "region", "registry", "operator_image", "sidecar_image", "trainer_image",
        "gpus", "overlay", "take_over")  # fmt: skip


def parse(argv: list[str], run_tag: str) -> Settings:
    """Settings from the command line, those of the own cluster with --context; exits with usage on an error."""
    parser = _parser()
    given = parser.parse_args(argv)
    own = given.context is not None
    on_gpus = own and given.gpus != 0
    interval = given.interval_steps or (GPU_INTERVAL_STEPS if on_gpus else Settings.interval_steps)
    steps = given.steps or 16 * interval
    if interval < 1:
        parser.error(f"--interval-steps {interval}: at least 1")
    if given.loss_tolerance is not None and not 0 < given.loss_tolerance < math.inf:
        parser.error(f"--loss-tolerance {given.loss_tolerance}: a number above 0, such as 1e-5")
    if said := own_rules.wrong_namespace(given.namespace):
        parser.error(said)
    if steps < (least := (10 if own else 8) * interval):
        parser.error(f"--steps {steps} leaves no room for the faults: use at least {least}")
    if not own:
        if more := [f"--{name.replace('_', '-')}" for name in _OWN if getattr(given, name) is not None]:
            parser.error(f"{', '.join(more)}: only with --context, for a cluster that you have")
        return Settings(
            out=given.out.resolve(), namespace=given.namespace, steps=steps, interval_steps=interval,
            cut_pod=1 if given.cut_pod is None else given.cut_pod, keep=given.keep, run_tag=run_tag,
            loss_tolerance=given.loss_tolerance or Settings.loss_tolerance,
        )  # fmt: skip
    _check_own(parser, given)
    gpus = OwnSettings.gpus if given.gpus is None else given.gpus
    settings = OwnSettings(
        out=given.out.resolve(), namespace=given.namespace, steps=steps, interval_steps=interval, keep=given.keep,
        loss_tolerance=given.loss_tolerance or (GPU_LOSS_TOLERANCE if gpus else Settings.loss_tolerance),
        run_tag=run_tag, ranks=gpus or CPU_RANKS, context=given.context, store=given.store,
        endpoint=given.endpoint or "", endpoint_here=given.endpoint_here or given.endpoint or "",
        region=given.region or os.environ.get("AWS_REGION", ""), gpus=gpus,
        operator_image=given.operator_image or _image(given.registry, "operator"),
        sidecar_image=given.sidecar_image or _image(given.registry, "sidecar"),
        trainer_image=given.trainer_image or _image(given.registry, "pretrain"),
        take_over=bool(given.take_over),
        overlay_folder=given.overlay.resolve() if given.overlay else None,
        credentials={name: os.environ[name] for name in CREDENTIALS if os.environ.get(name)},
    )  # fmt: skip
    if refused := list(own_rules.wrong(settings)):
        parser.error("; ".join(refused))
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo ARGS=...", description="Lose ranks, pods or a node; go on with fewer GPUs; prove it."
    )
    add = parser.add_argument
    add("--steps", type=int, help="optimizer steps of both runs (default: 16 intervals)")
    add(
        "--interval-steps",
        type=int,
        help=f"steps between saves ({Settings.interval_steps}; {GPU_INTERVAL_STEPS} on GPUs)",
    )
    add(
        "--cut-pod", type=int, choices=[0, 1],
        help="index of the pod whose node is cut off; pod 0 is the coordinator and hosts the rendezvous",
    )  # fmt: skip
    add("--keep", action="store_true", help="leave everything running")
    add("--namespace", default=Settings.namespace, help="namespace of the job")
    add("--out", type=Path, default=DEFAULT, help="folder for what the demo writes; emptied at the start")
    add(
        "--loss-tolerance", type=float,
        help=f"relative; {Settings.loss_tolerance:g} on CPUs, {GPU_LOSS_TOLERANCE:g} on GPUs (bfloat16)",
    )  # fmt: skip
    own = parser.add_argument_group("on a cluster that you have").add_argument
    own("--context", help="context of your kubeconfig; no other one is touched")
    own("--store", metavar="s3://BUCKET/PREFIX", help="the demo writes below a prefix of its own in it")
    own("--endpoint", metavar="URL", help="S3 server as pods reach it (default: Amazon's)")
    own("--endpoint-here", metavar="URL", help="the same as this machine reaches it, where that differs")
    own("--region", help="region of the bucket (default: $AWS_REGION)")
    own("--registry", help="of images rtj-operator, rtj-sidecar and rtj-pretrain of this version")
    own("--operator-image", help="where no operator is installed")
    own("--sidecar-image", help="where no operator is installed")
    own("--trainer-image", help="torch, the library and examples/pretrain as /workspace")
    own("--gpus", type=int, help="of each pod; 0: none, two ranks on CPUs (default: 2)")
    own(
        "--overlay", type=Path, metavar="FOLDER", help="patches of your own for the job (hack/demo/README.md)"
    )
    own(
        "--take-over", action="store_true", default=None,
        help="use the namespace of another run of the demo, whose jobs and release are replaced and go at the end",
    )  # fmt: skip
    return parser


def _check_own(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.cut_pod is not None:
        parser.error("--cut-pod cuts a node off the network, which is done on the local cluster only")
    if not given.context:
        parser.error("--context is empty: name a context of your kubeconfig")
    parts = urlsplit(given.store or "")
    if parts.scheme != "s3" or not parts.netloc:
        parser.error(f"--store {given.store}: --context needs a store that pods reach: s3://bucket/prefix")
    if not (given.trainer_image or given.registry):
        parser.error(
            "--context needs --trainer-image, or --registry with rtj-pretrain in it (examples/pretrain)"
        )
    if (given.gpus or 0) < 0:
        parser.error(f"--gpus {given.gpus}: 0 for CPUs only, or the GPUs of each pod")
    if given.overlay is not None and not given.overlay.is_dir():
        parser.error(f"--overlay {given.overlay}: there is no such folder")


def _image(registry: str | None, name: str) -> str:
    return f"{registry.rstrip('/')}/rtj-{name}:{__version__}" if registry else ""

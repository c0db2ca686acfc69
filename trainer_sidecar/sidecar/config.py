"""Where the sidecar runs and which run it serves: environment variables, each with a flag that beats it.

The epoch is not configuration: it comes from the plan file alone (operator.md O1).
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_sidecar.contract import volume as env
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.volume import DEFAULT_STATUS_PORT, Volume

PLAN_POLL_SECONDS = 0.05
SILENCE_SECONDS = 10.0
"""Silence that means lost; a fifth of it passes between reports (operator.md O10)."""


@dataclass(frozen=True)
class Config:
    """Settings of one sidecar process. `threads` bounds hashing and fetching; `silence` is in seconds."""

    volume: Volume
    plan_file: Path
    pod_index: int
    pod_name: str
    status_host: str
    status_port: int
    keys: RunKeys
    store_url: str
    store_endpoint: str | None
    store_region: str | None
    threads: int
    silence: float = SILENCE_SECONDS
    read_ahead: bool = True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtj-sidecar", description="Checkpoint sidecar of one training pod."
    )
    add = parser.add_argument
    get = os.environ.get
    add("--volume", default=get(env.ENV_VOLUME), help=f"shared volume ({env.ENV_VOLUME})")
    add("--plan-file", default=get(env.ENV_PLAN_FILE), help=f"live plan ({env.ENV_PLAN_FILE})")
    add("--pod-index", default=get(env.ENV_POD_INDEX, "0"), help=f"index of this pod ({env.ENV_POD_INDEX})")
    add(
        "--pod-name",
        default=get(env.ENV_POD_NAME, ""),
        help=f"name for logs and the journal ({env.ENV_POD_NAME})",
    )
    add("--status-host", default="0.0.0.0", help="address to listen on")
    add("--status-port", default=get(env.ENV_STATUS_PORT, str(DEFAULT_STATUS_PORT)), help="HTTP port")
    add("--namespace", default=get(env.ENV_NAMESPACE), help=f"namespace of the run ({env.ENV_NAMESPACE})")
    add("--run-id", default=get(env.ENV_RUN_ID), help=f"id of the run ({env.ENV_RUN_ID})")
    add("--store-url", default=get(env.ENV_STORE_URL), help=f"s3://... or file:///... ({env.ENV_STORE_URL})")
    add("--store-endpoint", default=get(env.ENV_STORE_ENDPOINT), help="endpoint of an S3 server")
    add("--store-region", default=get(env.ENV_STORE_REGION), help="region of the bucket")
    add("--threads", default=str(max(2, os.cpu_count() or 2)), help="threads that hash or fetch")
    add(
        "--silence", default=str(SILENCE_SECONDS), help="seconds of silence after which a peer counts as lost"
    )
    add("--no-read-ahead", action="store_true", help="read shards of a restore point only when ranks ask")
    return parser


def parse_config(argv: Sequence[str] | None = None) -> Config:
    """Config from flags and environment. Raises ValueError that names every missing setting, or the bad one."""
    args = _parser().parse_args(argv)
    required = {
        env.ENV_VOLUME: args.volume,
        env.ENV_PLAN_FILE: args.plan_file,
        env.ENV_NAMESPACE: args.namespace,
        env.ENV_RUN_ID: args.run_id,
        env.ENV_STORE_URL: args.store_url,
    }
    missing = [name for name, value in required.items() if not value]
    if missing:
        raise ValueError(f"the sidecar needs {', '.join(missing)}: set the environment variable or the flag")
    return Config(
        volume=Volume(Path(args.volume)),
        plan_file=Path(args.plan_file),
        pod_index=_number("pod index", args.pod_index, 0, 1 << 20),
        pod_name=args.pod_name or f"pod-{args.pod_index}",
        status_host=args.status_host,
        status_port=_number("status port", args.status_port, 0, 65535),
        keys=RunKeys(args.namespace, args.run_id),
        store_url=args.store_url,
        store_endpoint=args.store_endpoint or None,
        store_region=args.store_region or None,
        threads=_number("threads", args.threads, 1, 256),
        silence=float(args.silence),
        read_ahead=not args.no_read_ahead,
    )


def _number(what: str, text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{what} {text!r} is not a number") from None
    if not low <= value <= high:
        raise ValueError(f"{what} {value} is outside {low}..{high}")
    return value

"""`rtj drill faults`: the fault drills D1 to D10 on the user's cluster, with a report as JSON and as a page; and
`rtj drill sign`: a ResumeDrill with the signature that its faults need.

`faults` makes a namespace, trains a small script of its own there with the image and store of the user, breaks things,
measures, and takes everything away. Outside that namespace it touches a node's cordon (D10-evicted), a PriorityClass
(D10-preempted), and objects in the store below the scratch namespace's name, which stay.
"""

import argparse
import base64
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_sidecar.contract.fault_order import (
    LEAST_KEY_BYTES,
    MOST_AHEAD_SECONDS,
    SIGNATURE_ANNOTATION,
    signature_of,
)
from trainer_sidecar.faultdrills.settings import RPO_SECONDS, RTO_SECONDS, Settings
from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError, JsonObject
from trainer_sidecar.kube_commands.job_store import CREDENTIALS, add_reach_options
from trainer_sidecar.kube_commands.options import add_cluster_options, cluster_of, tell
from trainer_sidecar.store.open import open_store

if TYPE_CHECKING:
    from trainer_sidecar.faultdrills.outcome import Campaign
    from trainer_sidecar.faultdrills.scratch import Scratch

DEFAULT_KEY = "rtj-system/rtj-fault-key"
SIGN_SECONDS = 1800
_NAMES = "D1 to D9, D10-deleted, -evicted, -preempted, -memory, -hang, -node; D10: all of its kinds"


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    drill = subcommands.add_parser("drill", help="break a training job on purpose, and see what it costs")
    actions = drill.add_subparsers(dest="action", metavar="ACTION", required=True)
    parser = actions.add_parser(
        "faults", help="the drills D1 to D10 on this cluster, in a namespace of their own", epilog=CREDENTIALS
    )
    parser.add_argument("drills", nargs="*", metavar="DRILL", help=_NAMES)
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument(
        "-f", "--file", type=Path, metavar="JOB", help="job.yaml: its pod template and store are used"
    )
    parser.add_argument("--image", help="image with torch and the training library, instead of the file's")
    parser.add_argument("--store", metavar="URL", help="s3://bucket/prefix, instead of the file's")
    parser.add_argument("--ranks-per-node", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--rpo-seconds", type=float, metavar="S", help=f"limit of each drill (default {RPO_SECONDS:g})"
    )
    parser.add_argument(
        "--rto-seconds", type=float, metavar="S", help=f"limit of each drill (default {RTO_SECONDS:g})"
    )
    _add_key(parser)
    parser.add_argument(
        "--cut-node", default="", metavar="COMMAND", help="shell command that cuts node {node} off"
    )
    parser.add_argument(
        "--heal-node", default="", metavar="COMMAND", help="shell command that brings it back"
    )
    parser.add_argument("--to", type=Path, default=Path("fault-drills"), metavar="NAME",
                        help="writes NAME.json and NAME.html (default fault-drills)")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave the namespace and its last objects")
    add_reach_options(parser)
    add_cluster_options(parser, output=False)
    parser.set_defaults(handler=_faults)
    sign = actions.add_parser(
        "sign", help="print a ResumeDrill with its faults signed, for kubectl apply -f -"
    )
    sign.add_argument("file", type=Path, metavar="DRILL", help="drill.yaml, with spec.faults")
    sign.add_argument("--seconds", type=int, default=SIGN_SECONDS, metavar="S",
                      help=f"for which the signature holds (default {SIGN_SECONDS}, "
                      f"at most {MOST_AHEAD_SECONDS})")  # fmt: skip
    _add_key(sign)
    add_cluster_options(sign, output=False)
    sign.set_defaults(handler=_sign)


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fault-key-secret", default=DEFAULT_KEY, metavar="NAMESPACE/NAME",
                        help=f"Secret with the installation's fault key (default {DEFAULT_KEY})")  # fmt: skip
    parser.add_argument(
        "--fault-key-file", type=Path, metavar="FILE", help="the key in a file, instead of the Secret"
    )


def _sign(args: argparse.Namespace) -> int:
    import yaml

    from rtj_operator.api import InvalidJobError
    from rtj_operator.api.drill import parse_drill
    from rtj_operator.drills.sandbox import ordered_faults, sandbox_name

    if not 1 <= args.seconds <= MOST_AHEAD_SECONDS:
        raise ValueError(f"--seconds {args.seconds} must be from 1 to {MOST_AHEAD_SECONDS}")
    raw = _object_of(args.file)
    cluster = cluster_of(args)
    meta = raw["metadata"] = dict(raw.get("metadata") or {})
    if args.namespace and meta.get("namespace", args.namespace) != args.namespace:
        raise ValueError(f"{args.file} is of namespace {meta['namespace']}, and -n says {args.namespace}")
    meta["namespace"] = args.namespace or meta.get("namespace") or cluster.namespace
    try:
        drill = parse_drill(raw)
    except InvalidJobError as exc:
        raise ValueError(f"{args.file} is no ResumeDrill: {exc}") from exc
    orders, spec = ordered_faults(drill), drill.spec
    if not orders:
        raise ValueError(f"{args.file}: spec.faults is empty: there is nothing to sign")
    if not spec.deep:
        raise ValueError(f"{args.file}: spec.deep is false: a drill that restores nothing takes no faults")
    if spec.nodes is not None and (far := [o.pod for o in orders if o.pod >= spec.nodes]):
        raise ValueError(f"{args.file}: spec.faults has pod {far[0]}, and spec.nodes is {spec.nodes}")
    key, why = _key(args, cluster)
    if key is None or len(key) < LEAST_KEY_BYTES:
        short = f"it has {len(key or b'')} bytes of at least {LEAST_KEY_BYTES}"
        raise ValueError(f"no fault key: {why or short}")
    expires = int(time.time()) + args.seconds
    signature = signature_of(key, meta["namespace"], sandbox_name(drill), orders, expires)
    meta["annotations"] = {**(meta.get("annotations") or {}), SIGNATURE_ANNOTATION: signature.to_json()}
    print(yaml.safe_dump(raw, sort_keys=False), end="")
    return 0


def _faults(args: argparse.Namespace) -> int:
    from trainer_sidecar.faultdrills import campaign
    from trainer_sidecar.faultdrills.catalogue import DRILLS, chosen
    from trainer_sidecar.faultdrills.scratch import Scratch

    if bool(args.drills) == args.all:
        raise ValueError("name the drills, or say --all")
    if not args.to.parent.is_dir():
        raise ValueError(f"--to {args.to}: there is no folder {args.to.parent} for the report")
    drills = DRILLS if args.all else chosen(args.drills)
    cluster = cluster_of(args)
    scratch = Scratch(cluster, _settings(args, cluster))
    store = open_store(
        str(scratch.settings.store["url"]).rstrip("/"),
        endpoint=args.endpoint or scratch.settings.store.get("endpoint"),
        region=args.region or scratch.settings.store.get("region"),
    )
    tell(f"namespace {scratch.name}, store {store.url}, {len(drills)} drills")
    try:
        with sigterm_interrupts():
            scratch.make()
            done = campaign.run(
                drills, scratch, store, rpo_seconds=args.rpo_seconds, rto_seconds=args.rto_seconds, say=print
            )
    finally:
        store.close()
        if not args.keep:
            _take_away(scratch)
    _write(done, args.to)
    return 0 if done.passed else 1


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A SIGTERM is what Ctrl-C is: the report tells what was seen until then, and nothing is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _take_away(scratch: "Scratch") -> None:
    try:
        scratch.remove()
    except ClusterError as exc:  # what went wrong before it matters more
        tell(f"namespace {scratch.name} could not be taken away: {exc}")


def _write(done: "Campaign", to: Path) -> None:
    from trainer_sidecar.faultdrills import page

    data, text = to.with_suffix(".json"), to.with_suffix(".html")
    data.write_text(done.model_dump_json(by_alias=True, indent=2) + "\n", encoding="utf-8")
    text.write_text(page.page(done), encoding="utf-8")
    tell(f"{'passed' if done.passed else 'NOT passed'}: {data} and {text}")


def _settings(args: argparse.Namespace, cluster: Cluster) -> Settings:
    spec = _spec_of(args.file) if args.file else {}
    pod = (spec.get("template") or {}).get("spec") or {"containers": [{"name": "trainer"}]}
    trainer = next((c for c in pod.get("containers") or [] if c.get("name") == "trainer"), None)
    if trainer is None:
        raise ValueError(f"{args.file}: the template has no container named trainer")
    if args.image:
        trainer["image"] = args.image
    if not trainer.get("image"):
        raise ValueError("which image do the trainers have? Give -f job.yaml or --image")
    store = dict((spec.get("checkpoint") or {}).get("store") or {})
    if args.store:
        store["url"] = args.store
    if not store.get("url"):
        raise ValueError("where do checkpoints go? Give -f job.yaml or --store")
    key, why = _key(args, cluster)
    return Settings(
        template=pod,
        store=store,
        namespace=args.namespace or "",
        ranks=args.ranks_per_node,
        fault_key=key,
        why_no_key=why,
        cut_node=args.cut_node,
        heal_node=args.heal_node,
    )


def _spec_of(file: Path) -> JsonObject:
    return dict(_object_of(file)["spec"])


def _object_of(file: Path) -> JsonObject:
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as exc:
        raise ValueError(f"{file} cannot be read: {exc}") from exc
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise ValueError(f"{file} holds no object with a spec")
    return found


def _key(args: argparse.Namespace, cluster: Cluster) -> tuple[bytes | None, str]:
    """The fault key, or why there is none."""
    if args.fault_key_file:
        try:
            return args.fault_key_file.read_bytes().strip(), ""
        except OSError as exc:
            raise ValueError(f"the fault key cannot be read: {exc}") from exc
    namespace, _, name = args.fault_key_secret.partition("/")
    try:
        secret = cluster.call("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}", missing=True)
    except ClusterError as exc:
        return None, str(exc)
    if secret is None:
        return None, f"there is no Secret {args.fault_key_secret} (chart: faultInjection.enabled)"
    key = (secret.get("data") or {}).get("key")
    if not key:
        return None, f"Secret {args.fault_key_secret} has no entry key"
    return base64.b64decode(key).strip(), ""

"""`rtj logs`: the trainers' logs, that of the rank that failed first before all others.

Every rank writes when its peers are gone, so the log that explains a failure is one of many; the operator knows which.
"""

import argparse
import codecs
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from trainer_sidecar.commands.table import text_of
from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError, JsonObject
from trainer_sidecar.kube_commands.options import add_cluster_options, add_job, cluster_of, typed
from trainer_sidecar.kube_commands.words import Paint

if TYPE_CHECKING:
    from rtj_operator.api import JobStatus

_INDEX = "batch.kubernetes.io/job-completion-index"
_RANK = re.compile(r"\brank (\d+)\b")


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "logs", help="logs of a job's trainers, the first failing rank's before all others"
    )
    add_job(parser)
    parser.add_argument("--all", action="store_true", help="of all pods, not only of the first one")
    parser.add_argument("--rank", type=int, metavar="N", help="of the pod with this rank instead")
    parser.add_argument(
        "--sidecar", action="store_true", help="of the checkpoint sidecar, not of the trainer"
    )
    parser.add_argument(
        "--tail", type=int, default=200, metavar="N", help="last lines of each (default 200, -1: all)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on as it is written (one pod)")
    add_cluster_options(parser)
    parser.set_defaults(handler=_logs)


def _logs(args: argparse.Namespace) -> int:
    cluster = cluster_of(args)
    raw = cluster.job(args.job)
    status = typed(raw).status
    pods = in_order(cluster.pods(raw), status)
    if not pods:
        raise ClusterError(_without_pods(args.job, status))
    if args.rank is not None:
        pods = [_pod_of_rank(pods, status, args.rank)]
    chosen = pods if args.all and not args.follow else pods[:1]
    container = "rtj-sidecar" if args.sidecar else "trainer"
    tail = None if args.tail < 0 else args.tail
    if args.output == "json":
        texts = [b"".join(cluster.log(pod, container, tail=tail, follow=False)) for pod in chosen]
        rows = [
            {"pod": pod["metadata"]["name"], "container": container, "log": text.decode(errors="replace")}
            for pod, text in zip(chosen, texts, strict=True)
        ]
        print(json.dumps(rows, indent=2))
        return 0
    failed = _failure(status)
    for pod in chosen:
        _print(cluster, pod, container, tail, args.follow, failed if pod is pods[0] else "")
    return 0


def _print(
    cluster: Cluster, pod: JsonObject, container: str, tail: int | None, follow: bool, why: str
) -> None:
    paint = Paint(sys.stdout)
    where = f"==> {pod['metadata']['name']} on {pod['spec'].get('nodeName', 'no node')}, {container} <=="
    print(paint(where, "bold"), flush=True)
    if why:
        print(paint(f"    {text_of(why)}", "red"), flush=True)
    for text in _decoded(cluster.log(pod, container, tail=tail, follow=follow)):
        sys.stdout.write(text)
        sys.stdout.flush()


def _decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    """A character may lie across two chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in chunks:
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


def in_order(pods: Sequence[JsonObject], status: "JobStatus") -> list[JsonObject]:
    """Pods of the newest placement by index, the one that failed first in front; then those of older ones."""
    text = _failure(status)
    newest = max((pod_placement(pod) for pod in pods), default=0)
    failed = _failed_pod(pods, status)

    def key(pod: JsonObject) -> tuple[bool, bool, int]:
        name = pod["metadata"]["name"]
        first = name == failed or (bool(text) and re.search(rf"\b{re.escape(name)}\b", text) is not None)
        return not first, pod_placement(pod) != newest, pod_index(pod)

    return sorted(pods, key=key)


def _failure(status: "JobStatus") -> str:
    """The sentence of the newest end that was a failure; empty when it was none."""
    ended = [record for record in status.attempts if record.outcome]
    if not ended or ended[-1].outcome in ("Finished", "Saved", "Stopped"):
        return ""
    return f"attempt {ended[-1].attempt}: {ended[-1].message or ended[-1].outcome}"


def _failed_pod(pods: Sequence[JsonObject], status: "JobStatus") -> str:
    """By the rank in the sentence, when the pod that it names is gone and its successor has the same index."""
    found = _RANK.search(_failure(status))
    if found is None or status.plan is None:
        return ""
    index = int(found[1]) // status.plan.ranks_per_node
    newest = max((pod_placement(pod) for pod in pods), default=0)
    same = (pod for pod in pods if pod_index(pod) == index and pod_placement(pod) == newest)
    return next((str(pod["metadata"]["name"]) for pod in same), "")


def _pod_of_rank(pods: Sequence[JsonObject], status: "JobStatus", rank: int) -> JsonObject:
    if status.plan is None:
        raise ClusterError("no attempt has a plan yet, so no pod has ranks")
    if not 0 <= rank < status.plan.world_size:
        raise ClusterError(f"there is no rank {rank}: the world size is {status.plan.world_size}")
    index = rank // status.plan.ranks_per_node
    newest = max(pod_placement(pod) for pod in pods)
    for pod in pods:
        if pod_placement(pod) == newest and pod_index(pod) == index:
            return pod
    raise ClusterError(f"the pod of rank {rank} (index {index}) does not exist now")


def _without_pods(name: str, status: "JobStatus") -> str:
    said = f"job {name} has no pods now ({status.phase.value if status.phase else 'not seen by an operator'})"
    failed = _failure(status)
    last = status.attempts[-1].traceback if status.attempts else None
    return said + (f"; {failed}" if failed else "") + (f"\n{last}" if last else "")


def pod_index(pod: JsonObject) -> int:
    """Its index in its placement; 0 where it has none."""
    return _number(pod, _INDEX)


def pod_placement(pod: JsonObject) -> int:
    """Number of its placement; 0 where it has none."""
    return _number(pod, "resumabletraining.io/placement")


def _number(pod: JsonObject, label: str) -> int:
    text = str((pod["metadata"].get("labels") or {}).get(label, ""))
    return int(text) if text.isascii() and text.isdigit() else 0

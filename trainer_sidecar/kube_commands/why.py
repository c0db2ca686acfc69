"""`rtj why`: in sentences, what the operator waits for, what it would do next, and what a person can do."""

import argparse
import json
import sys
import textwrap
from dataclasses import asdict
from typing import Any

from trainer_sidecar.commands.table import text_of
from trainer_sidecar.kube_commands.cluster import Cluster, JsonObject, NoRightError
from trainer_sidecar.kube_commands.options import add_cluster_options, add_job, cluster_of, now, tell, typed
from trainer_sidecar.kube_commands.words import Paint

_HEADINGS = {
    "now": "Now",
    "next": "Next",
    "safe": "Safe",
    "before": "Before",
    "look_at": "Look at",
    "events": "Events",
    "you_can": "You can",
}
_EVENTS = 5
_WIDTH = 100


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "why", help="what a job waits for and what the operator would do next, in sentences"
    )
    add_job(parser)
    add_cluster_options(parser)
    parser.set_defaults(handler=_why)


def _why(args: argparse.Namespace) -> int:
    from trainer_sidecar.kube_commands.explain import explain

    cluster = cluster_of(args)
    raw = cluster.job(args.job)
    job = typed(raw)
    pods, events = _evidence(cluster, raw)
    said: dict[str, Any] = asdict(explain(job, pods, now()))
    said["events"] = [f"{e['at'][11:19]} {e.get('reason')}: {e.get('message')}" for e in events[-_EVENTS:]]
    if args.output == "json":
        print(json.dumps({"job": f"{job.metadata.namespace}/{job.metadata.name}", **said}, indent=2))
        return 0
    paint = Paint(sys.stdout)
    for key, heading in _HEADINGS.items():
        for index, sentence in enumerate(said[key]):
            lead = f"{heading}:" if index == 0 else ""
            body = textwrap.fill(
                text_of(sentence),
                _WIDTH,
                subsequent_indent=" " * 9,
                break_on_hyphens=False,
                break_long_words=False,
            )
            print(f"{paint(lead, 'bold')}{' ' * (9 - len(lead))}{body}")
    return 0


def _evidence(cluster: Cluster, raw: JsonObject) -> tuple[list[JsonObject], list[JsonObject]]:
    """(pods, events); without the right to read them, the job alone must do, and that is said."""
    found: list[list[JsonObject]] = []
    for read in (cluster.pods, cluster.events):
        try:
            found.append(read(raw))
        except NoRightError as exc:
            tell(str(exc))
            found.append([])
    return found[0], found[1]

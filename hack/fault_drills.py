"""`make drills-cluster`: the campaign `rtj drill faults` on the local cluster, with the chart's fault injection on.

Arguments go to the command (default --all); the report lands in drills-out/. Exit codes are the command's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from hack.cluster_world import ROOT, World
from trainer_sidecar.cli import main as rtj

OUT = Path("drills-out")
_NODE = f"n={{node}}; {sys.executable} {ROOT}/hack/cluster node %s ${{n#node}}"


def campaign(world: World, words: Sequence[str], out: Path) -> int:
    """`rtj drill faults WORDS` as a user of that cluster types it; `out` takes job.yaml and the report."""
    variables = world.cluster.variables
    os.environ |= {
        name: variables[name] for name in ("KUBECONFIG", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }
    out.mkdir(parents=True, exist_ok=True)
    file = out / "job.yaml"
    file.write_text(yaml.safe_dump(world.document("any", gpus=1)))
    options = ["-f", str(file), "--to", str(out / "report"), "--endpoint", world.cluster.host_s3_endpoint]
    nodes = ["--cut-node", _NODE % "cut", "--heal-node", _NODE % "heal"]
    return rtj(["drill", "faults", *words, *options, *nodes])


def main(argv: Sequence[str]) -> int:
    """Bring everything up, drill, take it down again; the cluster stays."""
    world = World(OUT.resolve() / "ledgers")
    world.folder.mkdir(parents=True, exist_ok=True)
    try:
        world.up()
        world.install(namespaces=[], faultInjection={"enabled": True})
        return campaign(world, argv or ["--all"], OUT.resolve())
    finally:
        world.down()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What `rtj-launch` needs of torchrun: processes with RANK, WORLD_SIZE and MASTER_*, all ended when one fails."""

import argparse
import os
import signal
import subprocess
import sys
import time


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("nnodes", "nproc-per-node", "node-rank", "master-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("rdzv-backend", "rdzv-id", "master-addr", "max-restarts", "monitor-interval"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    o = parser.parse_args(argv)
    ranks = [_start(o, local) for local in range(o.nproc_per_node)]
    while (codes := [r.poll() for r in ranks]) and any(c is None for c in codes):
        if any(c for c in codes):
            break
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGTERM)
    sys.exit(1 if any(r.wait() for r in ranks) else 0)


def _start(o: argparse.Namespace, local: int) -> "subprocess.Popen[bytes]":
    rank = o.node_rank * o.nproc_per_node + local
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(o.nnodes * o.nproc_per_node),
        "MASTER_ADDR": o.master_addr,
        "MASTER_PORT": str(o.master_port),
    }
    return subprocess.Popen(o.command, env=env)

"""Peers that are packages: a process in their own environment (`hack/setup.sh environment peers`).

Their packages pin a botocore that ours excludes, so they cannot stand beside it. The process makes as many tensors of
the same sizes, and for each line `save NAME` or `load NAME` does that once and answers with its seconds. What the store
does not hold afterwards, or what was not loaded, is an error and no figure. None of them hashes or verifies what it
reads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

TASK: dict[str, Any] = json.loads(os.environ["BENCH_PEER"]) if "BENCH_PEER" in os.environ else {}
BUCKET = "bench"
THREADS = 4


def _connector(region: str, endpoint: str) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3FileSystem

    config = S3ClientConfig(force_path_style=True)
    return S3FileSystem(region, s3_client=S3Client(region=region, endpoint=endpoint, s3client_config=config))


class Peers:
    """The same model for each of them."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        rows = TASK["bytes"] // 4 // TASK["tensors"] // 64
        self.state = {f"w.{i}": torch.randn(rows, 64) for i in range(TASK["tensors"])}
        self.first = next(iter(self.state.values())).clone()
        self.endpoint, self.region = os.environ["AWS_ENDPOINT_URL"], os.environ["AWS_REGION"]
        self.saves: dict[str, Callable[[str], object]] = {
            "s3torchconnector": self._save_connector,
            "DCP and s3fs": self._save_fsspec,
            "torchsnapshot": self._save_snapshot,
        }
        self.loads: dict[str, Callable[[str], object]] = {"s3torchconnector": self._load_connector}

    def _save_connector(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(self.region, path, thread_count=THREADS)
        writer.fs = _connector(self.region, self.endpoint)
        dcp.save(self.state, storage_writer=writer)

    def _load_connector(self, path: str) -> None:
        import torch
        import torch.distributed.checkpoint as dcp
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(self.region, path, reader_constructor=S3ReaderConstructor.sequential())
        reader.fs = _connector(self.region, self.endpoint)
        first = next(iter(self.state.values()))
        first.zero_()
        dcp.load(self.state, storage_reader=reader)
        if not torch.equal(first, self.first):
            raise RuntimeError(f"{path} was not loaded")

    def _save_fsspec(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        dcp.save(self.state, storage_writer=FsspecWriter(path, thread_count=THREADS))

    def _save_snapshot(self, path: str) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(path, {"model": StateDict(**self.state)})

    def stored(self, path: str) -> int:
        """Bytes below a path, as the store says."""
        import botocore.session

        client = botocore.session.get_session().create_client("s3")
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=path.split("/", 3)[3])
        return sum(o["Size"] for page in pages for o in page.get("Contents", []))


def main() -> None:
    """Answers `{"seconds": ...}` to each line of standard input, until that ends."""
    peers = Peers()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        act, name, path = line.rstrip("\n").split("\t")
        begin = time.monotonic()
        {"save": peers.saves, "load": peers.loads}[act][name](path)
        seconds = time.monotonic() - begin
        if act == "save" and (held := peers.stored(path)) < TASK["bytes"] // 64 // 4 * 64 * 4 * 0.99:
            raise RuntimeError(f"{name} stored {held} of {TASK['bytes']} bytes at {path}")
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()

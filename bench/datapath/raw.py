"""What the store itself gives: plain boto3 multipart with SHA-256 and ranged GETs, as fast as they go."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "store"))

from store_servers import ACCESS, SECRET, VersityGateway

BUCKET, PART, THREADS = "bench", 16 * 2**20, 4


@dataclass(frozen=True)
class Bucket:
    """The S3 server's bucket."""

    endpoint: str
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/runs"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def upload_seconds(self, size: int) -> float:
        """One object of `size` bytes, multipart, every part with SHA-256, and hashed as a whole by us."""
        data = np.random.default_rng(0).bytes(size)
        begin = time.monotonic()
        config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=THREADS)
        with Reader(data) as file:
            extra = {"ChecksumAlgorithm": "SHA256"}
            self.client.upload_fileobj(file, BUCKET, "raw/object", Config=config, ExtraArgs=extra)
        return time.monotonic() - begin

    def download_seconds(self, size: int) -> float:
        """The object in ranges of 8 MiB, each hashed, on as many threads as a restore has."""
        ranges = [(at, min(at + 8 * 2**20, size)) for at in range(0, size, 8 * 2**20)]
        target = bytearray(size)

        def one(place: tuple[int, int]) -> None:
            first, end = place
            body = self.client.get_object(Bucket=BUCKET, Key="raw/object", Range=f"bytes={first}-{end - 1}")[
                "Body"
            ]
            data = body.read()
            hashlib.sha256(data).digest()
            target[first:end] = data

        begin = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, ranges))
        return time.monotonic() - begin


class Reader:
    """Bytes as a file, without another copy of them."""

    def __init__(self, data: bytes) -> None:
        self._view, self._at = memoryview(data), 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._view.release()

    def read(self, size: int = -1) -> bytes:
        end = len(self._view) if size < 0 else self._at + size
        found = bytes(self._view[self._at : end])
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = {0: 0, 1: self._at, 2: len(self._view)}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


@contextmanager
def server(folder: Path) -> Iterator[Bucket]:
    """The S3 server with its bucket, for as long as the block lasts."""
    place = folder / "s3"
    place.mkdir()
    with VersityGateway(place) as gateway:
        client = boto3.client(
            "s3",
            endpoint_url=gateway.endpoint,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(max_pool_connections=THREADS + 2, s3={"addressing_style": "path"}),
        )
        client.create_bucket(Bucket=BUCKET)
        yield Bucket(gateway.endpoint, client)

"""What the store itself gives: plain boto3, multipart with SHA-256 and ranged GETs with SHA-256, as fast as they go.

Imported by the benchmark and by its ranks. Every transfer is counted: what the store does not hold afterwards, or gave
less of, was not measured.
"""

from __future__ import annotations

import base64
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config

BUCKET, PART, RANGE, THREADS = "bench", 8 * 2**20, 8 * 2**20, 4


@dataclass(frozen=True)
class Bucket:
    """The S3 server's bucket, seen through `endpoint`."""

    endpoint: str
    access: str
    secret: str

    def document(self) -> dict[str, str]:
        return asdict(self)

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/runs"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
        }

    @cached_property
    def client(self) -> Any:
        """Without the SDK's own checksums: the one that is sent covers the body, another hash would only cost time."""
        config = Config(
            max_pool_connections=THREADS + 2,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        )
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=config,
        )

    def upload_seconds(self, key: str, data: memoryview) -> float:
        """Seconds for one object, multipart, every part with its SHA-256. Raises RuntimeError when it is not there."""
        begin = time.monotonic()
        at = {"Bucket": BUCKET, "Key": key}
        created = self.client.create_multipart_upload(**at, ChecksumAlgorithm="SHA256")
        at_part = {**at, "UploadId": created["UploadId"]}

        def send(number: int) -> dict[str, Any]:
            body = bytes(data[(number - 1) * PART : number * PART])
            checksum = base64.b64encode(hashlib.sha256(body).digest()).decode()
            answer = self.client.upload_part(**at_part, PartNumber=number, Body=body, ChecksumSHA256=checksum)
            return {"ETag": answer["ETag"], "PartNumber": number, "ChecksumSHA256": checksum}

        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(send, range(1, -(-len(data) // PART) + 1)))
        self.client.complete_multipart_upload(**at_part, MultipartUpload={"Parts": parts})
        seconds = time.monotonic() - begin
        found = self.client.head_object(**at)["ContentLength"]
        if found != len(data):
            raise RuntimeError(f"{key} has {found} of {len(data)} bytes: the raw upload did not happen")
        return seconds

    def download_seconds(self, key: str, size: int) -> float:
        """Seconds for the object in ranges, each hashed and put into its place. Raises RuntimeError for other bytes."""
        begin = time.monotonic()
        target = bytearray(size)

        def one(first: int) -> int:
            end = min(first + RANGE, size)
            answer = self.client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={first}-{end - 1}")
            data = answer["Body"].read()
            hashlib.sha256(data).digest()
            target[first:end] = data
            return len(data)

        with ThreadPoolExecutor(THREADS) as pool:
            read = sum(pool.map(one, range(0, size, RANGE)))
        seconds = time.monotonic() - begin
        if read != size:
            raise RuntimeError(f"{key}: {read} of {size} bytes were read: the raw download did not happen")
        return seconds

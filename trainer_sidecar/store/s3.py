"""`s3://` over boto3: conditional creates, checksums that the store itself checks, typed errors.

Two clients: one with the SDK's retries for everything that may be repeated, one without for `create`, because a
retried conditional PUT meets itself as 412 (protocol R2). Uploads live in `s3_upload`.
"""

import ipaddress
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader
from urllib3.exceptions import HTTPError

from trainer_sidecar.store.base import (
    Hashes,
    NotFoundError,
    ObjectInfo,
    StoreError,
    TruncatedError,
    UnclearError,
    UnsupportedStoreError,
)
from trainer_sidecar.store.checksums import base64_crc32, base64_sha256, checksum_to_hex, crc32
from trainer_sidecar.store.s3_errors import translate
from trainer_sidecar.store.s3_upload import PlainHashes, upload

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
ENV_INSECURE = "RTJ_STORE_INSECURE"
ENV_ADDRESSING = "RTJ_STORE_ADDRESSING"
"""`path` (default with an endpoint), `virtual` or `auto`."""
_READ_TRIES = 4
_DELETE_BATCH = 1000


class _Models(Loader):
    """The SDK's description of S3, read once for all sessions: 12 MB, of which every session would keep its own."""

    @property
    def search_paths(self) -> list[str]:
        """A copy: boto3 adds a folder to it with each session."""
        return list(super().search_paths)


@cache
def _models() -> _Models:
    folders = botocore.session.get_session().get_config_variable("data_path")
    return _Models(str(folders).split(os.pathsep) if folders else None)


class S3Store:
    """Objects below `s3://bucket/prefix`. Thread-safe; make it after fork."""

    def __init__(self, bucket: str, prefix: str, client: "S3Client", once: "S3Client") -> None:
        self.bucket, self.prefix = bucket, f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.client, self.once = client, once
        self.page_size = 1000

    @classmethod
    def connect(
        cls,
        bucket: str,
        prefix: str,
        *,
        endpoint: str | None,
        region: str | None,
        credentials: Mapping[str, str] | None = None,
    ) -> "S3Store":
        """Clients from the environment, or with `credentials` (names as in the environment: AWS_ACCESS_KEY_ID, ...).

        Raises UnsupportedStoreError for a plain-text endpoint on a public network.
        """
        _require_tls(endpoint, f"s3://{bucket}")
        keys = credentials or {}
        core = botocore.session.get_session()
        core.register_component("data_loader", _models())
        session = boto3.session.Session(
            botocore_session=core,
            aws_access_key_id=keys.get("AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=keys.get("AWS_SECRET_ACCESS_KEY"),
            aws_session_token=keys.get("AWS_SESSION_TOKEN"),
        )

        def make(attempts: int) -> "S3Client":
            config = make_config(attempts, endpoint)
            client = session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
            client.meta.events.register_last("before-call.s3", _send_at_once)
            if endpoint:
                client.meta.events.register("before-call.s3", _stay_at_endpoint)
            return client

        try:
            return cls(bucket, prefix, make(6), make(1))
        except (BotoCoreError, ValueError) as exc:
            raise translate(exc, store=f"s3://{bucket}", key="", write=False) from exc

    def get(self, key: str) -> bytes:
        return self._read(key, {}, None)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        return self._read(key, {"Range": f"bytes={offset}-{offset + length - 1}"}, length)

    def head(self, key: str) -> ObjectInfo:
        answer = self.guard(
            key,
            lambda: self.client.head_object(Bucket=self.bucket, Key=self.full(key), ChecksumMode="ENABLED"),
        )
        sha256 = checksum_to_hex(answer.get("ChecksumSHA256"))
        crc = checksum_to_hex(answer.get("ChecksumCRC32"))
        parts = answer.get("ETag", "").strip('"').partition("-")[2]
        if sha256 and parts and "-" not in sha256:  # some servers leave the number of parts to the ETag
            sha256 = f"{sha256}-{parts}"
        return ObjectInfo(key, answer["ContentLength"], sha256, crc)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        arguments: dict[str, Any] = {
            "Bucket": self.bucket,
            "Prefix": self.full(prefix),
            "MaxKeys": self.page_size,
        }
        if start_after:
            arguments["StartAfter"] = self.full(start_after)
        while True:
            page = self.guard(prefix, lambda: self.client.list_objects_v2(**arguments))
            for item in page.get("Contents", []):
                yield ObjectInfo(item["Key"][len(self.prefix) :], item["Size"])
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def create(self, key: str, data: bytes) -> None:
        self.guard(
            key,
            lambda: self.once.put_object(
                Bucket=self.bucket,
                Key=self.full(key),
                Body=data,
                IfNoneMatch="*",
                ChecksumSHA256=base64_sha256(data),
                ContentType="application/json" if key.endswith(".json") else "application/octet-stream",
            ),
            write=True,
        )

    def create_large(
        self,
        key: str,
        data: memoryview,
        *,
        parallel: int = 4,
        hashes: Hashes | None = None,
        document: bool = False,
    ) -> ObjectInfo:
        return upload(self, key, data, parallel, hashes or PlainHashes(), document=document)

    def put(self, key: str, data: bytes) -> None:
        self.guard(
            key,
            lambda: self.client.put_object(
                Bucket=self.bucket, Key=self.full(key), Body=data, ChecksumSHA256=base64_sha256(data)
            ),
            write=True,
        )

    def delete(self, keys: Sequence[str]) -> None:
        for i in range(0, len(keys), _DELETE_BATCH):
            batch = keys[i : i + _DELETE_BATCH]
            answer = self.guard(
                batch[0],
                lambda batch=batch: self.client.delete_objects(  # type: ignore[misc]
                    Bucket=self.bucket,
                    Delete={"Objects": [{"Key": self.full(k)} for k in batch], "Quiet": True},
                ),
                write=True,
            )
            self._raise_first_refusal(answer.get("Errors", []))

    def discard_unfinished(self, prefix: str, wanted: Callable[[str], bool]) -> int:
        """Multipart uploads whose writers died."""
        arguments: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self.full(prefix)}
        found = 0
        while True:
            page = self.guard(prefix, lambda: self.client.list_multipart_uploads(**arguments))
            for item in page.get("Uploads", []):
                key = item["Key"][len(self.prefix) :]
                if item["Key"].startswith(self.full(prefix)) and wanted(key):
                    self._abort(key, item["UploadId"])
                    found += 1
            if not page.get("IsTruncated"):
                return found
            arguments["KeyMarker"] = page["NextKeyMarker"]
            arguments["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def _abort(self, key: str, upload_id: str) -> None:
        with suppress(NotFoundError, UnclearError):  # gone already
            self.guard(
                key,
                lambda: self.client.abort_multipart_upload(
                    Bucket=self.bucket, Key=self.full(key), UploadId=upload_id
                ),
            )

    def close(self) -> None:
        self.client.close()
        self.once.close()

    def put_claiming(self, key: str, data: bytes, *, of: bytes) -> None:
        """PUT `data` under the SHA-256 of `of`: a store that checks refuses it. For the probe."""
        self.guard(
            key,
            lambda: self.once.put_object(
                Bucket=self.bucket, Key=self.full(key), Body=data, ChecksumSHA256=base64_sha256(of)
            ),
            write=True,
        )

    def part_claiming(self, key: str, data: bytes, *, of: bytes) -> None:
        """The same as a part of an upload, under the CRC-32 of `of`; the upload is given up."""
        where: Any = {"Bucket": self.bucket, "Key": self.full(key)}
        begun = self.guard(
            key, lambda: self.once.create_multipart_upload(**where, ChecksumAlgorithm="CRC32"), write=True
        )
        where["UploadId"] = begun["UploadId"]
        wrong = base64_crc32(crc32(of))
        try:
            self.guard(
                key,
                lambda: self.once.upload_part(**where, PartNumber=1, Body=data, ChecksumCRC32=wrong),
                write=True,
            )
        finally:
            with suppress(StoreError):  # who may not abort leaves it to the sweep
                self._abort(key, where["UploadId"])

    def full(self, key: str) -> str:
        """The key within the bucket."""
        return self.prefix + key

    def guard(self, key: str, act: Callable[[], T], *, write: bool = False) -> T:
        """`act`, with everything that botocore raises translated."""
        try:
            return act()
        except (ClientError, BotoCoreError, HTTPError, OSError) as exc:
            raise translate(exc, store=self.url, key=key, write=write) from exc

    def _raise_first_refusal(self, errors: Sequence[Any]) -> None:
        """A batch delete answers 200 and names what it refused."""
        for error in errors:
            if error.get("Code") not in ("NoSuchKey", "NoSuchVersion"):
                answer: Any = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 200}}
                key = error.get("Key", "")[len(self.prefix) :]
                raise translate(ClientError(answer, "DeleteObjects"), store=self.url, key=key, write=True)

    def _read(self, key: str, extra: dict[str, Any], length: int | None) -> bytes:
        """The body; torn bodies are read again, because the SDK retries only up to the headers."""
        for attempt in range(_READ_TRIES):
            try:
                return self.guard(key, lambda: self._read_once(key, extra, length))
            except TruncatedError as exc:
                if attempt == _READ_TRIES - 1 or "[GetObject: 416" in str(exc):
                    raise
        raise AssertionError("unreachable")

    def _read_once(self, key: str, extra: dict[str, Any], length: int | None) -> bytes:
        answer = self.client.get_object(Bucket=self.bucket, Key=self.full(key), **extra)
        if length is not None and answer["ContentLength"] > length:
            answer["Body"].close()
            raise UnsupportedStoreError(
                f"{self.url}: {key}: {answer['ContentLength']} bytes come where {length} were asked: the store, "
                "or a proxy before it, ignores the Range header, and nothing can be restored through it; "
                "`rtj store probe` tells when it is mended",
                store=self.url,
                key=key,
            )
        with answer["Body"] as body:
            data = body.read()
        expected = answer["ContentLength"] if length is None else length
        if len(data) != expected:
            raise TruncatedError(
                f"{self.url}: {key}: {len(data)} bytes came where {expected} were asked: the object is shorter "
                "than its manifest says, or the answer broke off; verify the checkpoint",
                store=self.url,
                key=key,
            )
        return data


def make_config(attempts: int, endpoint: str | None) -> Config:
    """Client settings. Checksums of the SDK's own choosing are off (see `checksums`), unless the environment asks."""
    options: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": attempts},
        "connect_timeout": 5,
        "read_timeout": 30,
        "max_pool_connections": 32,
        "tcp_keepalive": True,
        "user_agent_extra": "resumable-training",
    }
    if "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
        options["request_checksum_calculation"] = "when_required"
    if "AWS_RESPONSE_CHECKSUM_VALIDATION" not in os.environ:
        options["response_checksum_validation"] = "when_required"
    # The checksum header is signed and covers the body: hashing the body once more to sign it would only cost time.
    options["s3"] = {"payload_signing_enabled": False}
    if endpoint:
        options["s3"]["addressing_style"] = os.environ.get(ENV_ADDRESSING, "path")
    return Config(**options)


def _send_at_once(params: dict[str, Any], **_: Any) -> None:
    """boto3 would wait for the store's word before it sends a file: a round trip for every part."""
    params["headers"].pop("Expect", None)


def _stay_at_endpoint(params: dict[str, Any], **_: Any) -> None:
    """A named endpoint is where the bucket is. botocore would ask it for the region on every 301, without end."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _require_tls(endpoint: str | None, store: str) -> None:
    if not endpoint or urlsplit(endpoint).scheme == "https" or os.environ.get(ENV_INSECURE) == "1":
        return
    host = urlsplit(endpoint).hostname
    if urlsplit(endpoint).scheme != "http" or not host:
        raise UnsupportedStoreError(
            f"{store}: endpoint {endpoint!r} is no http(s) URL: correct it", store=store
        )
    if not _is_private(host):
        raise UnsupportedStoreError(
            f"{store}: endpoint {endpoint} would carry data in plain text over a public network: use https, "
            f"or set {ENV_INSECURE}=1 if the way to it is private",
            store=store,
        )


def _is_private(host: str) -> bool:
    """Loopback and private addresses, and names that only resolve inside a machine or cluster. DNS is not asked."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".svc", ".svc.cluster.local", ".localhost", ".internal"))
    return address.is_private or address.is_loopback or address.is_link_local

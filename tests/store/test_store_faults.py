"""What goes over the wire, and what each fault of network, store and disk is called."""

import errno
import os
import time
from pathlib import Path

import pytest
from store_servers import FaultProxy, VersityGateway, make_bucket, make_certificate

from trainer_sidecar.store.base import (
    PART_UNIT,
    AccessDeniedError,
    AlreadyExistsError,
    BucketMissingError,
    ChecksumRefusedError,
    ClockSkewError,
    NoSpaceError,
    NotFoundError,
    ObjectInfo,
    Store,
    StoreError,
    TruncatedError,
    UnavailableError,
    UnclearError,
    UnsupportedStoreError,
    WrongRegionError,
)
from trainer_sidecar.store.checksums import base64_crc32, base64_sha256, crc32
from trainer_sidecar.store.commit import store_document
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.open import open_store
from trainer_sidecar.store.probe import probe_store
from trainer_sidecar.store.s3 import S3Store
from trainer_sidecar.store.verify import Expected, look_object


def answer(status: str, code: str, message: str = "as told") -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    lines = (
        f"HTTP/1.1 {status}",
        "Content-Type: application/xml",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def headers(head: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in head.split("\r\n")[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


# --- the wire ---------------------------------------------------------------------------------------------------------


def test_a_create_carries_the_condition_and_the_checksum(proxied_store: Store, proxy: FaultProxy) -> None:
    proxied_store.create("slot", b"entry")
    (head,) = proxy.requests("PUT ")
    sent = headers(head)
    assert sent["if-none-match"] == "*"
    assert sent["x-amz-checksum-sha256"] == base64_sha256(b"entry")
    assert "if-none-match" in sent["authorization"], "the condition is signed: nobody on the way can drop it"
    assert "x-amz-checksum-sha256" in sent["authorization"]


def test_a_small_shard_carries_the_condition_and_the_checksum(
    proxied_store: Store, proxy: FaultProxy
) -> None:
    proxied_store.create_large("shard", memoryview(b"bytes"))
    (head,) = proxy.requests("PUT ")
    assert headers(head)["if-none-match"] == "*"
    assert headers(head)["x-amz-checksum-crc32"] == base64_crc32(crc32(b"bytes"))


def test_every_part_carries_its_checksum_and_the_completion_the_condition(
    proxied_store: Store, proxy: FaultProxy
) -> None:
    proxied_store.create_large("shard", memoryview(bytes(2 * PART_UNIT + 1)))
    parts = [headers(h) for h in proxy.requests("PUT ")]
    assert len(parts) == 3
    assert {p["x-amz-checksum-crc32"] for p in parts} == {
        base64_crc32(crc32(bytes(PART_UNIT))),
        base64_crc32(crc32(b"\0")),
    }
    begin, complete = proxy.requests("POST ")
    assert headers(begin)["x-amz-checksum-algorithm"] == "CRC32"
    assert headers(begin)["x-amz-checksum-type"] == "COMPOSITE"
    assert headers(complete)["if-none-match"] == "*"


def test_a_create_is_never_retried_by_the_sdk(proxied_store: Store, proxy: FaultProxy) -> None:
    proxy.answer(1, answer("500 Internal Server Error", "InternalError"), when="PUT ")
    with pytest.raises(UnclearError):
        proxied_store.create("slot", b"entry")
    assert len(proxy.requests("PUT ")) == 1
    assert proxy.fired == 1


def test_the_store_refuses_bytes_and_parts_whose_checksum_is_wrong(s3_store: S3Store) -> None:
    for send in (s3_store.put_claiming, s3_store.part_claiming):
        with pytest.raises(ChecksumRefusedError, match="wrong"):
            send("wrong", b"these", of=b"those")
    assert s3_store.discard_unfinished("", lambda _: True) == 0


def test_documents_are_there_under_their_sha_256_and_shards_under_their_crc(s3_store: S3Store) -> None:
    ref = store_document(s3_store, "manifest.json", b"{}")
    assert s3_store.head("manifest.json") == ObjectInfo("manifest.json", 2, ref.sha256)
    assert store_document(s3_store, "manifest.json", b"{}") == ref
    with pytest.raises(ChecksumRefusedError, match="exists with SHA-256"):
        store_document(s3_store, "manifest.json", b"[]")
    found = look_object(s3_store, Expected("manifest.json", 2, sha256="00" * 32))
    assert found is not None
    assert found.found == f"SHA-256 {ref.sha256}"
    s3_store.create_large("shard", memoryview(b"{}"))
    assert s3_store.head("shard") == ObjectInfo("shard", 2, crc32=f"{crc32(b'{}'):08x}")


# --- lost and broken answers ------------------------------------------------------------------------------------------


def test_a_create_whose_reply_is_lost_is_unclear_and_has_landed(
    proxied_store: Store, proxy: FaultProxy
) -> None:
    proxy.drop_replies(1, when="PUT ")
    with pytest.raises(UnclearError, match="slot"):
        proxied_store.create("slot", b"entry")
    assert proxy.fired == 1
    assert proxied_store.get("slot") == b"entry"


def test_a_completion_whose_reply_is_lost_is_settled_by_looking(
    proxied_store: Store, proxy: FaultProxy
) -> None:
    data = memoryview(bytes(PART_UNIT + 9))
    proxy.drop_replies(1, when="POST ")  # the begin: retried by the SDK
    proxy.drop_replies(1, when="?uploadId=")
    assert proxied_store.create_large("shard", data).size == len(data)
    assert proxy.fired == 2


def test_a_completion_that_says_200_and_then_an_error_is_settled_by_looking(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    proxy.answer(
        1, answer("200 OK", "InternalError"), when="POST /rtj-test/" + proxied_store.full("shard?uploadId")
    )
    data = memoryview(bytes(PART_UNIT + 9))
    assert proxied_store.create_large("shard", data).size == len(data)
    assert proxy.fired == 1


def test_a_failed_upload_is_aborted(proxied_store: S3Store, proxy: FaultProxy) -> None:
    proxy.answer(99, answer("403 Forbidden", "AccessDenied"), when="partNumber=2")
    with pytest.raises(AccessDeniedError):
        proxied_store.create_large("shard", memoryview(bytes(PART_UNIT + 9)))
    left = proxied_store.client.list_multipart_uploads(
        Bucket=proxied_store.bucket, Prefix=proxied_store.full("")
    )
    assert not left.get("Uploads")
    with pytest.raises(NotFoundError):
        proxied_store.head("shard")


def test_a_small_upload_whose_reply_is_lost_is_its_own_rival_and_wins(
    proxied_store: Store, proxy: FaultProxy
) -> None:
    proxy.drop_replies(2, when="PUT ")
    assert proxied_store.create_large("shard", memoryview(b"bytes")).size == 5
    assert proxy.fired == 2


def test_a_body_that_breaks_off_is_read_again(proxied_store: Store, proxy: FaultProxy) -> None:
    proxied_store.create("object", bytes(100_000))
    proxy.cut_replies(2, after=10_000, when="GET ")
    assert proxied_store.get("object") == bytes(100_000)
    assert proxy.fired == 2


def test_a_body_that_always_breaks_off_is_a_truncation(proxied_store: Store, proxy: FaultProxy) -> None:
    proxied_store.create("object", bytes(100_000))
    proxy.cut_replies(99, after=10, when="GET ")
    with pytest.raises(TruncatedError, match="object"):
        proxied_store.get("object")


def test_a_store_that_slows_us_down_for_a_moment_is_waited_for(
    proxied_store: Store, proxy: FaultProxy
) -> None:
    proxied_store.create("object", b"x")
    proxy.answer(2, answer("503 Slow Down", "SlowDown"), when="GET ")
    assert proxied_store.get("object") == b"x"
    assert proxy.fired == 2


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("412 Precondition Failed", "PreconditionFailed", AlreadyExistsError),
        ("409 Conflict", "ConditionalRequestConflict", AlreadyExistsError),
        ("500 Internal Server Error", "InternalError", UnclearError),
        ("502 Bad Gateway", "", UnclearError),
        ("503 Slow Down", "SlowDown", UnclearError),
        ("504 Gateway Timeout", "", UnclearError),
        ("400 Bad Request", "RequestTimeout", UnclearError),
        ("403 Forbidden", "AccessDenied", AccessDeniedError),
        ("403 Forbidden", "SignatureDoesNotMatch", AccessDeniedError),
        ("400 Bad Request", "ExpiredToken", AccessDeniedError),
        ("403 Forbidden", "RequestTimeTooSkewed", ClockSkewError),
        ("404 Not Found", "NoSuchBucket", BucketMissingError),
        ("400 Bad Request", "BadDigest", ChecksumRefusedError),
        ("400 Bad Request", "AuthorizationHeaderMalformed", WrongRegionError),
        ("301 Moved Permanently", "PermanentRedirect", WrongRegionError),
        ("501 Not Implemented", "NotImplemented", UnsupportedStoreError),
        ("507 Insufficient Storage", "", NoSpaceError),
        ("400 Bad Request", "SomethingNew", StoreError),
    ],
)
def test_each_answer_to_a_create_has_one_name(
    proxied_store: Store, proxy: FaultProxy, status: str, code: str, kind: type[StoreError]
) -> None:
    proxy.answer(9, answer(status, code))
    with pytest.raises(kind) as caught:
        proxied_store.create("the/slot", b"entry")
    assert type(caught.value) is kind
    assert proxied_store.url in str(caught.value)
    assert "the/slot" in str(caught.value)
    assert code in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_store_that_is_not_there_is_unavailable(proxy: FaultProxy) -> None:
    from store_servers import free_port

    store = open_store("s3://bucket/x", endpoint=f"http://127.0.0.1:{free_port()}")
    begin = time.monotonic()
    with pytest.raises(UnavailableError, match="endpoint"):
        store.create("slot", b"")
    assert time.monotonic() - begin < 30


def test_a_missing_bucket_is_named(s3_endpoint: str) -> None:
    store = open_store("s3://no-such-bucket/x", endpoint=s3_endpoint)
    with pytest.raises(BucketMissingError, match="no-such-bucket"):
        store.create("slot", b"")
    with pytest.raises(BucketMissingError):
        list(store.list(""))


def test_wrong_credentials_are_named(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-it")
    with pytest.raises(AccessDeniedError, match="credentials"):
        open_store("s3://rtj-test/x", endpoint=s3_endpoint).create("slot", b"")


def test_absent_credentials_are_named(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AccessDeniedError, match="credentials"):
        open_store("s3://rtj-test/x", endpoint=s3_endpoint).get("slot")


def test_plain_text_over_a_public_network_is_refused_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnsupportedStoreError, match="https"):
        open_store("s3://b/x", endpoint="http://s3.example.com")
    for private in (
        "http://10.0.0.7:9000",
        "http://minio.store.svc:9000",
        "http://127.0.0.1:1",
        "https://s3.example.com",
    ):
        open_store("s3://b/x", endpoint=private, region="us-east-1").close()
    monkeypatch.setenv("RTJ_STORE_INSECURE", "1")
    open_store("s3://b/x", endpoint="http://s3.example.com", region="us-east-1").close()


@pytest.mark.parametrize(
    "url", ["s3://", "file://host/path", "file:relative", "ftp://x/y", "bucket/prefix", ""]
)
def test_what_is_no_store_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ValueError, match="file:///"):
        open_store(url)


@pytest.mark.s3
def test_tls_works_with_a_named_ca_and_says_what_is_missing_without(
    credentials: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    with VersityGateway(tmp_path, "--cert", certificate, "--key", key) as gateway:
        with pytest.raises(UnavailableError, match="AWS_CA_BUNDLE"):
            open_store("s3://rtj-test/x", endpoint=gateway.endpoint).create("slot", b"")
        monkeypatch.setenv("AWS_CA_BUNDLE", certificate)
        make_bucket(gateway.endpoint, "rtj-test")
        store = open_store("s3://rtj-test/x", endpoint=gateway.endpoint)
        store.create("slot", b"entry")
        data = memoryview(bytes(PART_UNIT + 3))
        assert store.create_large("shard", data).size == len(data)
        assert store.get("slot") == b"entry"


# --- file:// ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EROFS, AccessDeniedError),
        (errno.EACCES, AccessDeniedError),
        (errno.EIO, UnavailableError),
        (errno.ESTALE, UnavailableError),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_failing_disk_has_a_name_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreError], call: str
) -> None:
    store = FileStore(tmp_path)
    store.create("run/ok", b"x")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(kind, match="run/slot") as caught:
            store.create("run/slot", b"entry")
    assert store.url in str(caught.value)
    assert [o.key for o in store.list("")] == ["run/ok"]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["ok"], "no temporary file is left"
    store.create("run/slot", b"entry")


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(UnsupportedStoreError, match="link"):
        FileStore(tmp_path).create("slot", b"")


def test_r17_bytes_are_synced_before_the_name_appears_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    link, fsync = os.link, os.fsync
    store = FileStore(tmp_path)
    store.create("run/first", b"")

    def see_link(a: Path, b: Path) -> None:
        done.append("link")
        link(a, b)

    def see_fsync(fd: int) -> None:
        done.append("sync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file")
        fsync(fd)

    monkeypatch.setattr(os, "link", see_link)
    monkeypatch.setattr(os, "fsync", see_fsync)
    store.create("run/slot", b"entry")
    assert done == ["sync file", "link", "sync folder"]


def test_r17_a_link_that_nfs_reports_as_taken_by_itself_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_twice(a: Path, b: Path) -> None:
        link(a, b)
        link(a, b)

    monkeypatch.setattr(os, "link", link_twice)
    FileStore(tmp_path).create("slot", b"entry")
    assert FileStore(tmp_path).get("slot") == b"entry"


def test_a_key_cannot_leave_the_folder(tmp_path: Path) -> None:
    for key in ("../x", "a/../../x", "/etc/x", "", "a//b", ".tmp-x"):
        with pytest.raises(ValueError, match="object key"):
            FileStore(tmp_path / "s").create(key, b"")


def test_a_root_that_is_a_file_or_has_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BucketMissingError):
        FileStore(tmp_path / "file")
    store = FileStore(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    with pytest.raises(BucketMissingError, match="folder"):
        store.get("x")


def test_a_shard_that_stands_without_our_checksum_is_read_back(s3_store: S3Store) -> None:
    """As a sidecar of an earlier version has uploaded it, or a store shows it that keeps none."""
    data = bytes(PART_UNIT) + b"tail"
    s3_store.put("shard", data)
    assert s3_store.head("shard").crc32 is None
    assert s3_store.create_large("shard", memoryview(data)).size == len(data)
    with pytest.raises(ChecksumRefusedError, match="other bytes within"):
        s3_store.create_large("shard", memoryview(bytes(PART_UNIT) + b"liar"))


def test_a_proxy_that_ignores_ranges_is_no_short_object_and_is_found_by_the_probe(
    proxied_store: Store, proxy: FaultProxy
) -> None:
    """It would send gigabytes for each leaf, and the checkpoint would be accused."""
    proxied_store.create("whole", bytes(100))
    body = bytes(100)
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n" + body
    proxy.answer(1, whole, when="GET ")
    with pytest.raises(
        UnsupportedStoreError, match=r"100 bytes come where 5 were asked.*ignores the Range header"
    ):
        proxied_store.get_range("whole", 10, 5)
    assert proxied_store.get_range("whole", 10, 5) == bytes(5)


class IgnoresRanges(MemoryStore):
    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self.get(key)


def test_the_probe_reads_a_part_of_an_object() -> None:
    report = probe_store(IgnoresRanges(), large=False)
    (failed,) = [check for check in report.checks if not check.passed]
    assert "whole and in part" in failed.name
    assert "other 5 came back" in failed.detail

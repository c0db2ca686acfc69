"""The probe passes good stores, names what a bad one lacks, and leaves nothing behind."""

import time
from pathlib import Path

import pytest
from store_servers import FaultProxy

from trainer_sidecar.store.base import (
    AccessDeniedError,
    AlreadyExistsError,
    Store,
    UnclearError,
    UnsupportedStoreError,
)
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.open import open_store
from trainer_sidecar.store.probe import probe_store
from trainer_sidecar.store.probed import Probed


def test_every_good_store_passes_and_every_store_is_left_clean(
    store: Store, request: pytest.FixtureRequest
) -> None:
    report = probe_store(store)
    assert len(report.checks) >= 5
    assert list(store.list("")) == []
    if request.node.callspec.params["store"] != "moto":
        report.require()
        assert report.passed
        return
    with pytest.raises(UnsupportedStoreError, match="wrong SHA-256"):
        report.require()  # moto stores bytes whatever checksum they come with


class Overwriting(MemoryStore):
    """Ignores If-None-Match."""

    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


class Racy(MemoryStore):
    """Looks, then writes: concurrent writers all win."""

    def create(self, key: str, data: bytes) -> None:
        if any(o.key == key for o in self.list("")):
            raise AlreadyExistsError("occupied", key=key)
        time.sleep(0.05)  # the window between look and write, wide enough for every writer
        self.put(key, data)


@pytest.mark.parametrize(
    ("bad", "sentence"), [(Overwriting(), "If-None-Match"), (Racy(), "of 8 concurrent creates")]
)
def test_a_store_whose_creates_are_not_conditional_is_refused_by_name(bad: Store, sentence: str) -> None:
    report = probe_store(bad, large=False)
    with pytest.raises(UnsupportedStoreError, match=sentence) as caught:
        report.require()
    assert bad.url in str(caught.value)


def test_a_store_that_takes_wrong_checksums_is_refused(proxy: FaultProxy, proxied_store: Store) -> None:
    ok = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
    proxy.answer(1, ok, when="/wrong ")
    with pytest.raises(UnsupportedStoreError, match="wrong SHA-256"):
        probe_store(proxied_store, large=False).require()
    assert proxy.fired == 1


@pytest.mark.parametrize("at", ["/wrong ", "/wrong?uploads", "/wrong?uploadId="])
def test_a_store_that_throttles_the_probe_is_away_and_not_unfit(
    proxy: FaultProxy, proxied_store: Store, at: str
) -> None:
    said = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"
    head = b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(said)
    proxy.answer(1, head + said, when=at)
    probed = Probed()
    with pytest.raises(UnclearError, match="throttles"):
        probed.require(proxied_store)
    assert proxy.fired == 1
    probed.require(proxied_store)


def test_a_store_that_lets_nobody_in_is_an_error_and_no_verdict(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-it")
    with pytest.raises(AccessDeniedError):
        probe_store(open_store("s3://rtj-test/x", endpoint=s3_endpoint))

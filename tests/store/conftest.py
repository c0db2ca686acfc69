"""Stores of every kind for one conformance suite: memory, folder, moto, a real S3 server, with and without faults."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from store_servers import ACCESS, SECRET, FaultProxy, VersityGateway, make_bucket, start_moto

from trainer_sidecar.store.base import Store
from trainer_sidecar.store.faulty import FaultyStore
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.open import open_store

BUCKET = "rtj-test"


@pytest.fixture(scope="session")
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", os.environ.get("RTJ_S3_ACCESS_KEY", ACCESS))
        patch.setenv("AWS_SECRET_ACCESS_KEY", os.environ.get("RTJ_S3_SECRET_KEY", SECRET))
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def s3_endpoint(credentials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server: the one at RTJ_S3_ENDPOINT, else versitygw on a loopback port."""
    named = os.environ.get("RTJ_S3_ENDPOINT")
    if named:
        make_bucket(named, BUCKET)
        yield named
        return
    with VersityGateway(tmp_path_factory.mktemp("versitygw")) as gateway:
        make_bucket(gateway.endpoint, BUCKET)
        yield gateway.endpoint


@pytest.fixture(scope="session")
def moto_endpoint(credentials: None) -> Iterator[str]:
    server, endpoint = start_moto()
    make_bucket(endpoint, BUCKET)
    yield endpoint
    server.stop()


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(s3_endpoint) as made:
        yield made


@pytest.fixture
def s3_store(s3_endpoint: str) -> Iterator[Store]:
    store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", endpoint=s3_endpoint)
    yield store
    store.close()


@pytest.fixture
def proxied_store(proxy: FaultProxy) -> Iterator[Store]:
    store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", endpoint=proxy.endpoint)
    yield store
    store.close()


@pytest.fixture(params=["memory", "file", "faulty", "moto", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """One store of each kind."""
    kind = request.param
    if kind == "memory":
        yield MemoryStore()
    elif kind == "faulty":
        yield FaultyStore(MemoryStore())
    elif kind == "file":
        yield FileStore(tmp_path / "store")
    else:
        endpoint = request.getfixturevalue("moto_endpoint" if kind == "moto" else "s3_endpoint")
        made = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", endpoint=endpoint)
        yield made
        made.close()

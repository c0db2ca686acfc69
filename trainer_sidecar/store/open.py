"""From a store URL to a store: the one place that knows the schemes."""

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainer_sidecar.contract.volume import ENV_STORE_ENDPOINT, ENV_STORE_REGION
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.memory import MemoryStore


def open_store(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    credentials: Mapping[str, str] | None = None,
    make: bool = True,
) -> Store:
    """The store at `url`: `s3://bucket/prefix`, `file:///folder` or `memory://name` (one per process).

    For s3, endpoint and region default to RTJ_STORE_ENDPOINT and RTJ_STORE_REGION, then to what boto3 finds;
    credentials (unless given, under their names in the environment), CA bundle (AWS_CA_BUNDLE) and proxies come from
    the environment as boto3 reads it. Nothing is sent yet. `make`: a `file://` folder that does not exist is made.
    Raises ValueError for a URL that is none of these; StoreError when a `file://` folder cannot be made.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _open_file(url, unquote(parts.path), parts.netloc, make)
    if parts.scheme == "s3" and parts.netloc:
        from trainer_sidecar.store.s3 import S3Store

        return S3Store.connect(
            parts.netloc,
            parts.path.strip("/"),
            endpoint=endpoint or os.environ.get(ENV_STORE_ENDPOINT) or None,
            region=region or os.environ.get(ENV_STORE_REGION) or None,
            credentials=credentials,
        )
    if parts.scheme == "memory" and parts.netloc:
        return MemoryStore.shared(url.rstrip("/"))
    raise ValueError(f"{url!r} is not a store URL: use s3://bucket/prefix or file:///folder")


def _open_file(url: str, path: str, host: str, make: bool) -> FileStore:
    if host not in ("", "localhost") or not path.startswith("/"):
        raise ValueError(f"{url!r} does not name a folder of this machine: use file:///absolute/folder")
    return FileStore(Path(path), make=make)

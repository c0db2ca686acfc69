"""Many stores in one process, each with credentials of its own: an operator has one per team."""

from __future__ import annotations

from trainer_sidecar.store.s3 import S3Store


def opened(name: str) -> S3Store:
    keys = {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": "secret"}
    return S3Store.connect("bucket", "", endpoint="http://127.0.0.1:9", region="us-east-1", credentials=keys)


def test_stores_share_what_describes_s3_and_nothing_of_their_credentials() -> None:
    one, two = opened("one"), opened("two")
    described = [store.client.meta.service_model.metadata for store in (one, two)]
    assert described[0] is described[1], "12 MB that each would keep"
    keys = [store.client._request_signer._credentials.access_key for store in (one, two)]  # type: ignore[attr-defined]
    assert keys == ["one", "two"]

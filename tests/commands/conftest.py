"""A run with commits in a store of each kind, and `rtj` called as a user does."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

import store_world as world
from store_servers import ACCESS, SECRET, VersityGateway, make_bucket

from trainer_sidecar import cli
from trainer_sidecar.contract.journal import Manifest
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.fence import Fenced
from trainer_sidecar.store.history import History
from trainer_sidecar.store.open import open_store

BUCKET = "rtj-commands"


@dataclass
class Run:
    """A run in a store, its commits, and the command line at it."""

    url: str
    store: Store
    fenced: Fenced
    commits: list[Manifest]
    capture: Callable[[], Any]

    @property
    def ids(self) -> list[str]:
        return [m.checkpoint_id for m in self.commits]

    def commit(self, step: int) -> Manifest:
        self.commits.append(world.save(self.store, self.fenced, step))
        return self.commits[-1]

    def rtj(self, *words: str, code: int = 0) -> str:
        """stdout of `rtj <words>` at this run; the exit code must be `code`. stderr is in `said`."""
        where = ["--store", self.url]
        if words[0] != "store":
            where += ["--namespace", world.KEYS.namespace, "--run-id", world.KEYS.run_id]
        found = cli.main([*words, *where])
        out, self.said = self.capture()
        assert found == code, (found, out, self.said)
        return str(out)

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.rtj(*words, "--output", "json", code=code))

    def history(self) -> History:
        return world.journal(self.store).read()

    def flip(self, key: str) -> None:
        """Another byte where the store has one, as a disk would do it."""
        data = bytearray(self.store.get(key))
        data[len(data) // 2] ^= 1
        self.store.delete([key])
        self.store.put(key, bytes(data))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, VersityGateway(tmp_path_factory.mktemp("s3")) as gateway:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        make_bucket(gateway.endpoint, BUCKET)
        yield gateway.endpoint


@pytest.fixture
def s3_url(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(
        "RTJ_STORE_ENDPOINT", s3_server
    )  # for this test: others in this process have servers too
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return str(request.getfixturevalue("s3_url"))


@pytest.fixture
def run(url: str, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Three commits of attempt 1 at steps 1, 2 and 3."""
    store = open_store(url)
    made = Run(url, store, world.fence(store), [], capsys.readouterr)
    for step in (1, 2, 3):
        made.commit(step)
    yield made
    store.close()

"""Runs on a real S3 server, with sidecars that are real processes and ranks in pure Python."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sidecar"))
sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
sys.path.insert(0, str(Path(__file__).parent))

from drill_steps import BUCKET
from sidecar_world import World
from store_servers import ACCESS, SECRET, VersityGateway, make_bucket


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VersityGateway]:
    """The S3 server; its data lies in files below `folder`, where a drill can damage it behind its back."""
    with pytest.MonkeyPatch.context() as patch, VersityGateway(tmp_path_factory.mktemp("s3")) as gateway:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        make_bucket(gateway.endpoint, BUCKET)
        yield gateway


@pytest.fixture
def make_world(server: VersityGateway, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes runs of (nodes, ranks per node) in a prefix of their own; `endpoint` is a proxy's for the sidecars only."""
    made: list[World] = []

    def make(nodes: int = 1, ranks_per_node: int = 4, endpoint: str = "") -> World:
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        world = World(tmp_path / f"world-{len(made)}", nodes, ranks_per_node, url, server.endpoint)
        for pod in world.pods:
            pod.endpoint = endpoint or server.endpoint
        made.append(world)
        return world

    yield make
    for world in made:
        world.close()

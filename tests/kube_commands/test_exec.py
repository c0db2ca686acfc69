"""A command in a container, over the API server's web socket: what it wrote, how it ended, or why it could not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from aiohttp import WSMsgType, web
from kubernetes import client

from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError

STDOUT, STDERR, ERROR = b"\x01", b"\x02", b"\x03"
POD = {"metadata": {"name": "sft-p1-0-abcde", "namespace": "team"}}
PATH = "/api/v1/namespaces/team/pods/sft-p1-0-abcde/exec"


def failed(code: int) -> bytes:
    status = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]}}
    return ERROR + json.dumps(status).encode()


ANSWERS = {
    "good": [STDOUT + b"SIGKILL to rank 0\n", ERROR + b'{"status": "Success"}'],
    "bad": [STDERR + b"no rank runs here\n", failed(1)],
    "odd": [ERROR + b'{"status": "Failure"}'],
    "slow": [STDOUT + b"still at it"],
}


class Server:
    """Answers exec by the first word of the command, and notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, list[str]]] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get(PATH, self._exec)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        query = {name: request.query.getall(name) for name in request.query}
        self.asked.append(query)
        word = query["command"][0]
        if word == "forbidden":
            return web.Response(status=403, text="no right to exec")
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for frame in ANSWERS[word]:
            await socket.send_bytes(frame)
        if word != "slow":
            await socket.close()
        async for message in socket:
            if message.type is WSMsgType.CLOSE:
                break
        return socket


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.start()
    yield made
    made.stop()


def cluster(server: Server) -> Cluster:
    settings = client.Configuration()
    settings.host = f"http://127.0.0.1:{server.port}"
    return Cluster(client.ApiClient(settings), "team")


def test_what_a_command_wrote_comes_back(server: Server) -> None:
    assert cluster(server).execute(POD, "trainer", ["good", "-c", "x y"]) == "SIGKILL to rank 0\n"
    (query,) = server.asked
    assert query["command"] == ["good", "-c", "x y"]
    assert query["container"] == ["trainer"]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("bad", "bad in trainer of pod sft-p1-0-abcde ended with 1: no rank runs here"),
        ("odd", "odd in trainer of pod sft-p1-0-abcde did not say how it ended"),
        ("slow", "slow in trainer of pod sft-p1-0-abcde did not end within 1 s: still at it"),
        ("forbidden", "forbidden in trainer of pod sft-p1-0-abcde cannot be run"),
    ],
)
def test_a_command_that_fails_says_how(server: Server, word: str, why: str) -> None:
    with pytest.raises(ClusterError) as told:
        cluster(server).execute(POD, "trainer", [word], timeout=1 if word == "slow" else 30)
    assert str(told.value).startswith(why)

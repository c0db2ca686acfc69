"""A request that the API server was too busy for is asked again at once; a look needs several answers in a row."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rtj_operator import kube
from rtj_operator.kube import RTJ, ApiServer, Busy, Invalid, Unavailable, connect


def asked(
    tmp_path: Path,
    answers: list[int],
    ask: Callable[[ApiServer], Awaitable[Any]],
    sentence: str = "later",
) -> tuple[Any, list[str]]:
    """What `ask` got from a server that answers with these codes and then with 200, and the methods that it saw."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        code = answers[len(seen)] if len(seen) < len(answers) else 200
        seen.append(request.method)
        body = (
            {"metadata": {"name": "j"}}
            if code == 200
            else {"reason": "Busy", "message": sentence, "code": code}
        )
        return web.json_response(body, status=code)

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        config = tmp_path / "kubeconfig"
        config.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        server = await connect(str(config))
        try:
            return await ask(server)
        finally:
            await server.close()
            await runner.cleanup()

    return asyncio.run(run()), seen


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "BUSY_WAITS", (0.01, 0.01, 0.01))


def test_a_read_and_a_write_are_asked_again_while_the_server_is_busy(tmp_path: Path) -> None:
    found, seen = asked(tmp_path, [503, 429, 503], lambda s: s.get(RTJ, "ns", "j"))
    assert (found["metadata"]["name"], seen) == ("j", ["GET"] * 4)
    _, seen = asked(tmp_path, [429], lambda s: s.create(RTJ, "ns", {"metadata": {"name": "j"}}))
    assert seen == ["POST"] * 2


def test_a_server_that_stays_busy_is_left_to_the_queue(tmp_path: Path) -> None:
    async def ask(server: ApiServer) -> None:
        with pytest.raises(Busy, match=r"GET .*/resumabletrainingjobs/j: 429 Busy: later"):
            await server.get(RTJ, "ns", "j")

    assert asked(tmp_path, [429] * 9, ask)[1] == ["GET"] * 4


def test_what_a_server_could_not_do_is_not_asked_twice(tmp_path: Path) -> None:
    async def ask(server: ApiServer) -> None:
        with pytest.raises(Unavailable):
            await server.get(RTJ, "ns", "j")

    assert asked(tmp_path, [500], ask)[1] == ["GET"]


def test_a_field_that_the_installed_crd_does_not_have_is_no_trouble_of_the_server(tmp_path: Path) -> None:
    """An operator that was upgraded before its CRD: asking again changes nothing, and the user has to know."""
    sentence = (
        "failed to create typed patch object (ns/j; resumabletraining.io/v1alpha1, "
        "Kind=ResumableTrainingJob): .status.checkpointInterval: field not declared in schema"
    )

    def write(server: ApiServer) -> Awaitable[Any]:
        return server.write_status(RTJ, "ns", "j", {"phase": "Running"}, uid="u", resource_version="1")

    with pytest.raises(Invalid, match="field not declared in schema"):
        asked(tmp_path, [500], write, sentence)

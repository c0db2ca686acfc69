"""A sidecar's answer counts for the pod that it is of, and is not unpacked before its size counts."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from aiohttp import web
from fake_kube import FakeKube
from operator_values import EPOCH, plan, pod, sidecar

from rtj_operator.observe import MAX_STATUS_BYTES, Observer, answers_for
from trainer_sidecar.contract.status import SidecarStatus

OWN = sidecar(0, run="ns/sft", pod="sft-p1-0")


def test_a_pods_own_answer_counts_before_and_with_its_plan() -> None:
    assert answers_for(pod(0, plan=True), OWN)
    assert answers_for(pod(0), OWN)


def test_an_answer_of_an_older_sidecar_that_does_not_say_whose_it_is_counts() -> None:
    assert answers_for(pod(0, plan=True), sidecar(0))


@pytest.mark.parametrize(
    "other",
    [
        {"pod": "other-p1-0"},
        {"pod": "sft-p2-0"},
        {"pod": "", "run": "ns/other"},
        {"pod": "", "run": "elsewhere/sft"},
    ],
)
def test_an_answer_of_another_pod_or_run_at_the_same_address_is_none(other: dict[str, str]) -> None:
    assert not answers_for(pod(0, plan=True), OWN.model_copy(update=other))


def test_a_sidecar_that_has_not_seen_the_newest_plan_yet_is_not_silent() -> None:
    assert answers_for(pod(0, plan=plan("nonce-2", epoch=EPOCH + 1)), OWN)


async def polled(body: bytes, **headers: str) -> tuple[SidecarStatus | None, str]:
    """What an observer makes of an answer, and the encodings that it said it takes."""
    accepted = ""

    async def status(request: web.Request) -> web.Response:
        nonlocal accepted
        accepted = request.headers.get("Accept-Encoding", "")
        return web.Response(body=body, headers=headers)

    app = web.Application()
    app.router.add_get("/status", status)
    runner, observer = web.AppRunner(app, shutdown_timeout=0.1), Observer(FakeKube())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    view = pod(0, ip="127.0.0.1")
    try:
        return (await observer._poll([view], runner.addresses[0][1]))[view.uid], accepted
    finally:
        await observer.close()
        await runner.cleanup()


def test_an_answer_that_would_grow_when_unpacked_is_never_unpacked() -> None:
    packed = gzip.compress(OWN.to_bytes() + b" " * (100 * MAX_STATUS_BYTES))
    assert len(packed) < MAX_STATUS_BYTES
    assert asyncio.run(polled(packed, **{"Content-Encoding": "gzip"})) == (None, "identity")
    small = gzip.compress(OWN.to_bytes())
    assert asyncio.run(polled(small, **{"Content-Encoding": "gzip"}))[0] is None
    assert asyncio.run(polled(OWN.to_bytes()))[0] == OWN


def test_an_answer_at_the_right_address_from_another_pod_is_silence() -> None:
    stranger = OWN.model_copy(update={"pod": "other-p1-0"})
    assert asyncio.run(polled(stranger.to_bytes()))[0] is None

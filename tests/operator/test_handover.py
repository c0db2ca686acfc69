"""Calls from kopf's thread on the operator's loop: all of them, in order, and one wake-up for many."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from rtj_operator.handover import Handover


def test_calls_before_somebody_takes_them_are_forgotten() -> None:
    async def told() -> list[int]:
        heard: list[int] = []
        handover = Handover()
        handover.call(heard.append, 1)
        handover.open()
        handover.call(heard.append, 2)
        await asyncio.sleep(0)
        return heard

    assert asyncio.run(told()) == [2]


def test_calls_of_another_thread_are_made_in_order_and_a_crowd_of_them_wakes_the_loop_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def told() -> tuple[list[int], int]:
        loop, heard = asyncio.get_running_loop(), list[int]()
        wake_ups, wake = [], loop.call_soon_threadsafe

        def counted(act: Callable[[], None]) -> asyncio.Handle:
            wake_ups.append(act)
            return wake(act)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        handover = Handover()
        handover.open()

        def say(first: int, last: int) -> threading.Thread:
            def crowd() -> None:
                for number in range(first, last):
                    handover.call(heard.append, number)

            thread = threading.Thread(target=crowd)
            thread.start()
            return thread

        say(0, 5000).join()  # the loop stands still meanwhile, as it does in the middle of a reconcile
        at_once = len(wake_ups)
        talker = say(5000, 20000)
        while talker.is_alive() or len(heard) < 20000:
            await asyncio.sleep(0)
        return heard, at_once

    heard, at_once = asyncio.run(told())
    assert heard == list(range(20000)), "none is lost or overtaken, whenever the loop was at them"
    assert at_once == 1


def test_a_call_that_fails_is_told_and_keeps_back_none_behind_it_nor_later_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def told() -> list[int]:
        heard: list[int] = []
        handover = Handover()
        handover.open()
        handover.call(heard.append, 1)
        handover.call(heard.index, 99)
        handover.call(heard.append, 2)
        await asyncio.sleep(0)
        handover.call(heard.append, 3)
        await asyncio.sleep(0)
        return heard

    assert asyncio.run(told()) == [1, 2, 3]
    assert "99 is not in list" in caplog.text


def test_calls_of_many_threads_are_all_made() -> None:
    async def told() -> list[tuple[int, int]]:
        heard: list[tuple[int, int]] = []
        handover = Handover()
        handover.open()

        def crowd(speaker: int) -> None:
            for number in range(3000):
                handover.call(heard.append, (speaker, number))

        threads = [threading.Thread(target=crowd, args=(speaker,)) for speaker in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return heard

    heard = asyncio.run(told())
    for speaker in range(4):
        assert [number for who, number in heard if who == speaker] == list(range(3000))

"""The coalescing queue under a clock that the test owns."""

import asyncio

import pytest

from rtj_operator.queue import Backoff, KeyQueue

A, B = ("ns", "a"), ("ns", "b")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> KeyQueue:
    return KeyQueue(clock, lambda: 0.5, Backoff(base=1, cap=8))


def test_many_adds_are_one_take(queue: KeyQueue) -> None:
    for _ in range(5):
        queue.add(A)
    assert queue.take() == A
    assert queue.take() is None


def test_a_key_is_never_worked_on_twice_at_once_and_comes_again_when_it_changed_meanwhile(
    queue: KeyQueue,
) -> None:
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    assert queue.take() is None
    queue.done(A)
    assert queue.take() == A


def test_the_longest_waiting_key_comes_first(queue: KeyQueue, clock: Clock) -> None:
    queue.add(B)
    clock.now += 1
    queue.add(A)
    assert [queue.take(), queue.take()] == [B, A]


def test_news_are_before_looks_that_are_due_anyway_but_not_before_those_that_wait_for_long(
    queue: KeyQueue, clock: Clock
) -> None:
    queue.add_after(A, 1)
    clock.now += 1 + 4
    queue.add(B)
    assert [queue.take(), queue.take()] == [B, A], (
        "a failure does not wait for a hundred looks at healthy jobs"
    )
    for key in (A, B):
        queue.done(key)
    queue.add_after(A, 1)
    clock.now += 1 + 6
    queue.add(B)
    assert queue.age() == 6, "news do not look old"
    assert [queue.take(), queue.take()] == [A, B], "a flood of news holds nobody up for ever"


def test_an_earlier_time_wins_over_a_later_one(queue: KeyQueue, clock: Clock) -> None:
    queue.add_after(A, 60)
    queue.add_after(A, 5)
    queue.add_after(A, 30)
    assert queue.next_due() == 5
    clock.now += 5
    assert queue.take() == A
    clock.now += 100
    assert queue.take() is None


def test_a_requeue_waits_unless_an_event_came_first(queue: KeyQueue, clock: Clock) -> None:
    queue.add(A)
    queue.take()
    queue.done(A, requeue_after=3)
    assert queue.take() is None
    queue.add(A)
    assert queue.take() == A


def test_failures_wait_longer_each_time_up_to_the_cap_and_success_forgets_them(
    queue: KeyQueue, clock: Clock
) -> None:
    waits = []
    for _ in range(6):
        queue.add(A)
        clock.now += 100
        assert queue.take() == A
        waits.append(queue.retry(A))
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    clock.now += 10
    queue.take()
    queue.done(A)
    queue.add(A)
    queue.take()
    assert queue.retry(A) == 0.5


def test_age_is_that_of_the_key_that_waits_for_a_worker(queue: KeyQueue, clock: Clock) -> None:
    assert queue.age() == 0
    queue.add_after(B, 50)
    queue.add(A)
    clock.now += 7
    assert queue.age() == 7
    assert len(queue) == 1


def test_get_wakes_up_for_a_new_key() -> None:
    async def scenario() -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        queue = KeyQueue(loop.time, lambda: 0.5)
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add_after(A, 0.01)
        return await asyncio.wait_for(waiting, 5)

    assert asyncio.run(scenario()) == A


@pytest.mark.parametrize("turns", range(6))
def test_a_worker_that_is_cancelled_just_as_news_arrive_ends(turns: int) -> None:
    """An operator that is told to stop must not work on: `turns` of the loop lie between news and order."""

    async def scenario() -> bool:
        queue = KeyQueue(asyncio.get_running_loop().time, lambda: 0.5)

        async def work() -> None:
            while True:
                queue.done(await queue.get())

        queue.add_after(B, 30)
        worker = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        queue.add(A)
        for _ in range(turns):
            await asyncio.sleep(0)
        worker.cancel()
        done, _ = await asyncio.wait({worker}, timeout=5)
        return worker in done

    assert asyncio.run(scenario()), "it works on"

"""How many threads send a shard follows what uploads have taken."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_sidecar.sidecar.retry import StoppedError
from trainer_sidecar.sidecar.upload_pace import UploadPace
from trainer_sidecar.sidecar.upload_threads import CONNECTIONS, FEWEST, UploadThreads

PARTS = 128
SIZE = PARTS * 8 * 1024 * 1024


def uploads(threads: UploadThreads, rate: Callable[[int], float], count: int, ranks: int = 1) -> list[int]:
    """What is chosen, upload after upload, by a store that gives `rate(threads)` bytes per second."""
    chosen = []
    for _ in range(count):
        n = threads.choose(PARTS, ranks)
        threads.took(n, PARTS, SIZE, SIZE / rate(n))
        chosen.append(n)
    return chosen


def test_where_each_connection_is_slow_more_are_taken_until_all_are() -> None:
    chosen = uploads(UploadThreads(), lambda n: n * 80e6, 40)
    assert chosen[:6] == [FEWEST] * 3 + [FEWEST * 2] * 3
    assert chosen[-1] == CONNECTIONS


def test_where_four_fill_the_link_a_trial_is_given_back_and_made_again_much_later() -> None:
    chosen = uploads(UploadThreads(), lambda _: 400e6, 80)
    assert set(chosen) == {FEWEST, FEWEST * 2}
    assert chosen.count(FEWEST * 2) == 5, "of 80 uploads"


def test_a_link_that_eight_fill_gets_eight() -> None:
    chosen = uploads(UploadThreads(), lambda n: min(n, 8) * 80e6, 60)
    assert chosen[-1] == 8
    assert set(chosen[6:]) == {4, 8, 16}, "and now and then another number is tried"
    assert chosen[6:].count(8) > 45


def test_a_number_that_pays_no_more_is_given_back() -> None:
    threads = UploadThreads()
    assert uploads(threads, lambda n: n * 80e6, 40)[-1] == CONNECTIONS
    chosen = uploads(threads, lambda n: 640e6 / (1 + n / 32), 200)
    assert chosen[-20:].count(FEWEST) > 15


def test_noise_makes_no_climb() -> None:
    """Each upload by chance a sixth faster or slower, whatever the number: of 300, in 20 runs, few take many."""
    ended = []
    for seed in range(20):
        chance = random.Random(seed)
        ended.append(uploads(UploadThreads(), lambda _, c=chance: 400e6 * c.uniform(0.85, 1.15), 300)[-1])
    assert max(ended) <= FEWEST * 2
    assert ended.count(FEWEST) >= 18


@pytest.mark.parametrize(("ranks", "most"), [(1, 32), (4, 8), (8, 4), (64, 4)])
def test_the_ranks_of_a_pod_share_its_connections(ranks: int, most: int) -> None:
    assert max(uploads(UploadThreads(), lambda n: n * 80e6, 40, ranks)) == most


def test_few_parts_say_nothing_and_take_no_more_threads_than_they_are() -> None:
    threads = UploadThreads()
    assert [threads.choose(parts, 1) for parts in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 4]
    for _ in range(9):
        threads.took(4, 7, SIZE, 1.0)
    assert threads.choose(PARTS, 1) == FEWEST


def save() -> Any:
    return SimpleNamespace(awaited=threading.Event(), ended=threading.Event())


def test_a_limit_spreads_what_is_sent_and_the_first_part_goes_at_once() -> None:
    pace, began = UploadPace(), time.monotonic()
    pace.take(10**12, save())  # no limit yet
    pace.limit(1_000_000)
    for _ in range(3):
        pace.take(200_000, save())
    assert 0.4 <= time.monotonic() - began < 30


def test_another_limit_does_not_wait_for_what_was_let_go_at_the_old_one() -> None:
    pace, began = UploadPace(), time.monotonic()
    pace.limit(1)
    pace.take(10**6, save())
    pace.limit(1)
    assert pace._free > began + 10**5, "the same limit of another plan: what was booked stays booked"
    pace.limit(10**9)
    pace.take(10**6, save())
    assert time.monotonic() - began < 30


def test_what_training_waits_for_is_let_go_and_an_end_stops_what_waits() -> None:
    pace = UploadPace()
    pace.limit(1)
    pace.take(1000, save())
    ends, waits = save(), save()
    results: list[str] = []

    def take(of: Any, name: str) -> None:
        try:
            pace.take(1000, of)
            results.append(f"{name} sent")
        except StoppedError:
            results.append(f"{name} stopped")

    threads = [threading.Thread(target=take, args=(of, name)) for of, name in ((ends, "a"), (waits, "b"))]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert results == []
    ends.ended.set()
    ends.awaited.set()
    waits.awaited.set()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == ["a stopped", "b sent"]
    pace.take(10**9, waits)  # at once

"""Two replicas and one Lease: who leads, on a clock of the test's own, against the API server in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from fake_kube import FakeKube

from rtj_operator.elector import Elector, LostLeadership
from rtj_operator.kube import LEASES, AlreadyExists, Conflict, KubeError, Object, Unavailable
from rtj_operator.main import elector_of, lead, parse


class Clock:
    """Time that moves only when somebody sleeps or the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Flaky(FakeKube):
    """An API server that can be away."""

    away = False

    async def get(self, *args: Any) -> Object:
        if self.away:
            raise Unavailable("connection refused")
        return await super().get(*args)


def candidate(kube: FakeKube, name: str, clock: Clock) -> Elector:
    return Elector(kube, "rtj", "operator", name, clock=clock, sleep=clock.sleep)


def lease(kube: FakeKube) -> Object:
    spec: Object = kube.objects[(LEASES.plural, "rtj", "operator")]["spec"]
    return spec


def test_the_first_replica_leads_and_the_second_stands_by_while_it_renews() -> None:
    async def both() -> None:
        kube, clock = FakeKube(), Clock()
        first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
        assert await first.try_once()
        for _ in range(40):
            clock.now += 5
            assert await first.try_once()
            assert not await second.try_once()
        assert lease(kube)["holderIdentity"] == "a"

    asyncio.run(both())


def test_a_replica_that_dies_is_followed_after_the_duration_by_the_survivors_own_clock() -> None:
    async def death() -> None:
        kube, clock = FakeKube(), Clock()
        first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
        await first.try_once()
        assert not await second.try_once()
        clock.now += 59
        assert not first.leading, "the dead one would have stopped 20 s before"
        assert not await second.try_once()
        clock.now += 2
        assert await second.try_once()
        assert (lease(kube)["holderIdentity"], lease(kube)["leaseTransitions"]) == ("b", 1)

    asyncio.run(death())


def test_a_replica_that_was_stopped_and_goes_on_knows_at_once_that_it_does_not_lead() -> None:
    async def stopped() -> None:
        kube, clock = FakeKube(), Clock()
        first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
        await first.try_once()
        await second.try_once()
        clock.now += 61  # SIGSTOP
        assert await second.try_once()
        assert not first.leading
        with pytest.raises(LostLeadership, match="not held any more by a"):
            await first.keep()
        assert second.leading
        assert lease(kube)["holderIdentity"] == "b", "it did not write over its follower"

    asyncio.run(stopped())


def test_an_order_to_end_lets_the_other_begin_at_its_next_try() -> None:
    async def released() -> None:
        kube, clock = FakeKube(), Clock()
        first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
        await first.try_once()
        assert not await second.try_once()
        await first.release(5)
        assert not first.leading
        assert await second.try_once()
        await first.release(5)
        assert lease(kube)["holderIdentity"] == "b", "a second release takes nothing from its follower"

    asyncio.run(released())


def test_a_lease_that_cannot_be_given_back_in_time_holds_up_no_end() -> None:
    async def hanging() -> None:
        kube, clock = FakeKube(), Clock()
        only = candidate(kube, "a", clock)
        await only.try_once()

        async def never(*_: Any) -> Object:
            await asyncio.Event().wait()
            return {}

        kube.get = never  # type: ignore[method-assign]
        await only.release(0.01)
        assert not only.leading

    asyncio.run(hanging())


def test_an_api_server_that_is_away_is_survived_up_to_the_renew_deadline() -> None:
    async def outage() -> None:
        kube, clock = Flaky(), Clock()
        only = candidate(kube, "a", clock)
        await only.try_once()
        kube.away = True
        clock.now += 30
        assert await only.try_once(), "30 s without an answer"
        kube.away = False
        assert await only.try_once()
        kube.away = True
        begun = clock.now
        with pytest.raises(LostLeadership):
            await only.keep()
        assert 40 <= clock.now - begun <= 45

    asyncio.run(outage())


def test_two_that_reach_for_a_free_lease_at_once_do_not_both_get_it() -> None:
    async def race() -> None:
        kube, clock = FakeKube(), Clock()
        first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
        await first.try_once()
        await first.release(5)
        seen = await kube.get(LEASES, "rtj", "operator")
        assert await second.try_once()

        async def stale(*_: Any) -> Object:
            return seen

        kube.get = stale  # type: ignore[method-assign]
        assert not await first.try_once()

    asyncio.run(race())


class Unheard(FakeKube):
    """An API server that does a write, answers 503, and refuses the repetition for its old version (`Kube._call`)."""

    unheard, edits = False, 0

    async def _lost(self, write: Awaitable[Object], error: KubeError) -> Object:
        done = await write
        if not self.unheard:
            return done
        self.unheard = False
        raise error

    async def create(self, *args: Any, **kwargs: Any) -> Object:
        return await self._lost(super().create(*args, **kwargs), AlreadyExists("it exists", status=409))

    async def patch(self, *args: Any, **kwargs: Any) -> Object:
        if self.edits:
            self.edits -= 1
            raise Conflict("somebody labelled it", status=409)
        return await self._lost(super().patch(*args, **kwargs), Conflict("another version", status=409))


def test_a_renewal_that_was_done_though_its_answer_was_lost_keeps_the_lead() -> None:
    async def lost() -> None:
        kube, clock = Unheard(), Clock()
        kube.unheard = True
        first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
        assert await first.try_once(), "created"
        clock.now += 5
        kube.unheard = True
        assert await first.try_once(), "renewed"
        assert not await second.try_once()
        clock.now += 61
        kube.unheard = True
        assert await second.try_once(), "taken over"
        assert not await first.try_once()
        assert lease(kube)["leaseTransitions"] == 1

    asyncio.run(lost())


def test_an_edit_of_the_lease_costs_no_lead_and_no_lead_lasts_without_a_write() -> None:
    async def edited() -> None:
        kube, clock = Unheard(), Clock()
        only = candidate(kube, "a", clock)
        await only.try_once()
        before = lease(kube)["renewTime"]
        clock.now += 35
        kube.edits = 1
        assert await only.try_once()
        assert lease(kube)["renewTime"] != before, "written in the end"
        kube.edits = 1000
        clock.now += 35
        assert await only.try_once()
        clock.now += 10
        assert not await only.try_once(), "45 s after the last write"

    asyncio.run(edited())


class Paced(Clock):
    """A clock that stands still until the test lets it go."""

    step = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds * self.step
        await asyncio.sleep(0.001)


class Works:
    """Stands in for the runtime and for the watches: says whether it was begun and ended."""

    standby, namespaces = False, ()
    begun = ended = False

    def leading(self) -> bool:
        return True

    def start(self) -> None:
        self.begun = True

    async def sweep(self) -> None:
        """Nothing to find."""

    async def run(self) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            self.ended = True


def test_the_process_works_only_while_it_leads_and_ends_when_it_does_not() -> None:
    async def life() -> None:
        kube, clock = Flaky(), Paced()
        other = candidate(kube, "b", clock)
        await other.try_once()
        works = Works()
        task = asyncio.create_task(lead(candidate(kube, "a", clock), kube, works, works))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert works.standby
        assert not works.begun
        await other.release(5)
        while not works.begun:
            await asyncio.sleep(0.001)
        assert not works.standby
        kube.away, clock.step = True, 1.0
        with pytest.raises(LostLeadership):
            await asyncio.wait_for(task, 5)
        assert works.ended

    asyncio.run(life())


def test_without_a_lease_there_is_no_election_and_a_bad_name_is_refused() -> None:
    assert elector_of(parse([]), FakeKube()) is None
    assert elector_of(parse(["--leader-lease", "rtj/operator"]), FakeKube()) is not None
    with pytest.raises(ValueError, match="must be namespace/name"):
        elector_of(parse(["--leader-lease", "operator"]), FakeKube())

"""What goes wrong around a save while one rank trains: a full volume, a newer attempt, an error in the background."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from in_process import Parts, rank_of
from rank_world import RankWorld, eventually, topology
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, Plan, WhenBusy
from trainer_sidecar.train import Fenced, ResumeRefused, SaveFailed, Session, state_digest
from trainer_sidecar.train.errors import StagingFailed
from trainer_sidecar.train.saves import Code
from trainer_sidecar.train.staging import Stager

pytestmark = pytest.mark.timeout(120)
WAITING = CheckpointPolicy(interval_steps=2, interval_seconds=0, when_busy=WhenBusy.WAIT)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("trouble") / "run")
    yield made
    made.close()


def outcome_of(world: RankWorld, plan: Plan) -> Outcome:
    path = world.volume.outcome_dir(plan.epoch) / "rank-00000.json"
    return Outcome.model_validate_json(path.read_bytes())


def commits_of(world: RankWorld, plan: Plan) -> list[int]:
    return [c.step for c in world.commits() if c.epoch == plan.epoch]


class FullVolume:
    """`posix_fallocate` as on a volume without space, while `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.refused = True, 0
        self._real = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self._allocate)

    def _allocate(self, fd: int, offset: int, length: int) -> None:
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self._real(fd, offset, length)


def test_a_full_volume_fails_the_save_by_name_and_training_goes_on(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = world.attempt(topology(1, 4), checkpoint=WAITING)
    volume = FullVolume(monkeypatch)

    def each(session: Session) -> None:
        if session.step == 3:
            volume.full = False

    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with parts.session(total_steps=6) as session:
            parts.train(session, each)
    assert volume.refused >= 1
    assert commits_of(world, plan) == [4, 6]  # step 2 was lost, and nothing else
    said = [r.getMessage() for r in caplog.records if "save of step 2 failed" in r.getMessage()]
    assert len(said) == 1
    assert "bytes of the shared volume" in said[0]
    assert "raise checkpoint.staging.size" in said[0]
    assert outcome_of(world, plan).kind == OutcomeKind.FINISHED
    assert world.status()["consecutiveFailures"] == 0


def test_another_set_of_what_trains_inside_ddp_is_told_at_its_first_save_by_name_and_refused_at_the_resume(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradual unfreezing, or another adapter: DDP keeps the list that it was made with."""

    def begin() -> Parts:
        Session.mesh_from_env("cpu")  # before DDP
        parts = Parts()
        parts.model.get_submodule("0").requires_grad_(False)
        parts.model = DistributedDataParallel(parts.model)
        return parts

    def unfreeze(session: Session) -> None:
        if session.step == 3:
            parts.model.get_submodule("module.0").requires_grad_(True)

    plan = world.attempt(topology(1, 4), checkpoint=WAITING)
    with rank_of(world, plan, monkeypatch):
        parts = begin()
        with parts.session(total_steps=6) as session:
            parts.train(session, unfreeze)
    assert commits_of(world, plan) == [2, 4, 6]
    (said,) = [r.getMessage() for r in caplog.records if "what trains was changed" in r.getMessage()]
    assert said.startswith(
        "step 4: what trains was changed inside DistributedDataParallel: 0.bias, 0.weight (requires"
    )
    again = world.attempt(topology(1, 4), world.commit_of(4), checkpoint=WAITING)
    with (
        rank_of(world, again, monkeypatch),
        pytest.raises(ResumeRefused, match="train only in the checkpoint"),
    ):
        begin().session(total_steps=6)


class Hoard:
    """State that is more than a rank's documents may be, until it is thrown away."""

    def __init__(self) -> None:
        self.texts = ["x" * (1 << 20)] * 64

    def state_dict(self) -> dict[str, list[str]]:
        return {"texts": self.texts}

    def load_state_dict(self, state: dict[str, list[str]]) -> None:
        self.texts = state["texts"]


def test_documents_above_the_limit_fail_the_save_by_the_name_of_the_largest_and_the_next_one_commits(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan, hoard = world.attempt(topology(1, 4), checkpoint=WAITING), Hoard()

    def each(session: Session) -> None:
        if session.step == 3:
            hoard.texts.clear()

    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with parts.session(total_steps=4, extra={"box": hoard}) as session:
            parts.train(session, each)
    assert commits_of(world, plan) == [4]
    (said,) = [r.getMessage() for r in caplog.records if "save of step 2 failed" in r.getMessage()]
    found = re.search(
        r"rank 0 has (\d+) bytes of documents .* takes 67108864 .* largest is extra.box with (\d+) bytes",
        said,
    )
    assert found is not None, said
    assert 64 << 20 < int(found[2]) < int(found[1]) < 65 << 20


def test_a_volume_that_stays_full_makes_the_end_fail_by_name(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = world.attempt(topology(1, 4), checkpoint=WAITING)
    FullVolume(monkeypatch)
    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with (
            pytest.raises(SaveFailed, match="step 3 is not committed after up to 3 tries") as raised,
            parts.session(total_steps=3) as session,
        ):
            parts.train(session)
    assert "raise checkpoint.staging.size" in str(raised.value)
    assert outcome_of(world, plan).kind == OutcomeKind.FAILED
    assert commits_of(world, plan) == []


def test_saves_that_fail_in_a_row_end_the_attempt_at_a_bound_and_a_store_that_is_away_never_does(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = WAITING.model_copy(update={"interval_steps": 1, "max_failed_saves": 3})
    plan = world.attempt(topology(1, 4), checkpoint=policy)
    reason = {"says": "StoreUnavailable: frozen weights are not in the store within the save's time"}
    real, steps = Stager.stage, []

    def stage(self: Stager, *arguments: Any) -> int:
        if steps and steps[-1] >= 2:
            raise StagingFailed(reason["says"])
        return real(self, *arguments)

    def each(session: Session) -> None:
        steps.append(session.step)
        if session.step == 10:
            assert session._saves.failures_in_row == 0
            reason["says"] = "this rank cannot stage"

    monkeypatch.setattr(Stager, "stage", stage)
    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with (
            pytest.raises(
                SaveFailed, match=r"3 saves in a row failed, checkpoint\.maxFailedSaves is 3"
            ) as raised,
            parts.session(total_steps=50) as session,
        ):
            parts.train(session, each)
    assert "from the newest commit, step 2; the last one failed because rank 0 gave up: this rank" in str(
        raised.value
    )
    assert 10 < steps[-1] < 20
    assert outcome_of(world, plan).kind == OutcomeKind.FAILED


def test_a_newer_attempt_fences_training_at_its_next_save(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal alone says so: this attempt's sidecar has not heard of the other one."""
    plan = world.attempt(topology(1, 4), checkpoint=WAITING)

    def each(session: Session) -> None:
        if session.step == 5:
            eventually(lambda: commits_of(world, plan) == [2, 4], "step 4 committed")
            world.attempt(topology(1, 4), publish=False)
        assert session.step < 9, "trained on although it was fenced"

    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with (
            pytest.raises(Fenced, match=f"newer attempt exists, step 6 .* epoch {plan.epoch}"),
            parts.session(total_steps=20) as session,
        ):
            parts.train(session, each)
    assert commits_of(world, plan) == [2, 4]
    assert outcome_of(world, plan).kind == OutcomeKind.FENCED


def test_a_sidecar_that_serves_a_newer_attempt_fences_training_too(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = world.attempt(topology(1, 4), checkpoint=WAITING)

    def each(session: Session) -> None:
        if session.step == 3:
            world.attempt(topology(1, 4))
        assert session.step < 9, "trained on although it was fenced"

    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with pytest.raises(Fenced), parts.session(total_steps=20) as session:
            parts.train(session, each)
    assert outcome_of(world, plan).kind == OutcomeKind.FENCED


def test_a_copy_that_breaks_is_raised_and_the_save_is_given_up_at_once(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks have staged theirs: their parts would stay in flight until the save's time-out."""
    plan = world.attempt(topology(1, 4), checkpoint=WAITING)

    def broken(*_: Any) -> int:
        raise RuntimeError("the copy of step 2 broke")

    monkeypatch.setattr(Stager, "stage", broken)
    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with pytest.raises(RuntimeError, match="step 2 broke"), parts.session(total_steps=20) as session:
            parts.train(session)
        save = session._saves.in_flight
        assert save is not None
        assert save.over.wait(20)
        assert (save.code, save.step) == (Code.FAILED, 2)
        assert save.detail.endswith("RuntimeError: the copy of step 2 broke")
    assert outcome_of(world, plan).kind == OutcomeKind.FAILED
    assert commits_of(world, plan) == []


class BrokenDigest(BaseException):
    """An error that `except Exception` misses, as torch's CheckpointException is (P13)."""


@pytest.mark.parametrize("at_close", [False, True], ids=["at the next step", "at close"])
def test_an_error_of_the_background_is_raised_where_training_can_see_it(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, at_close: bool
) -> None:
    """Not swallowed (field: a stager's error was dropped, a save error vanished at close)."""
    plan = world.attempt(topology(1, 4), checkpoint=WAITING)

    reached = threading.Event()

    def broken(*_: Any) -> int:
        assert reached.wait(30)
        raise BrokenDigest("the digest of step 2 broke")

    monkeypatch.setattr(state_digest, "of_staged", broken)
    seen: list[int] = []

    def each(session: Session) -> bool:
        save = session._saves.in_flight
        if save is not None:
            reached.set()
            save.over.wait()
        seen.append(session.step)
        return at_close and session.step == 2

    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with pytest.raises(BrokenDigest, match="step 2 broke"), parts.session(total_steps=20) as session:
            parts.train(session, each)
    assert seen[-1] == 2
    assert outcome_of(world, plan).kind == OutcomeKind.FAILED


def test_saves_by_seconds_come_no_closer_than_their_interval(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CheckpointPolicy(interval_steps=0, interval_seconds=0.2)
    plan = world.attempt(topology(1, 4), checkpoint=policy)

    began: set[float] = set()

    def enough(session: Session) -> bool:
        began.add(session._policy._pace._began)
        return session._saves.committed_step is not None and len(commits_of(world, plan)) >= 3

    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with parts.session(total_steps=200_000) as session:
            parts.train(session, enough)
    entries = [c for c in world.commits() if c.epoch == plan.epoch]
    assert [c.reason for c in entries[:3]] == ["Interval"] * 3
    steps = [c.step for c in entries]
    assert steps == sorted(set(steps))
    times = sorted(began)
    assert len(times) >= 4  # the first is the session's own beginning
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(times))


def test_another_interval_in_the_plan_reaches_ranks_that_train_and_what_a_save_costs_is_told(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CheckpointPolicy(interval_steps=0, interval_seconds=0.05)
    plan = world.attempt(topology(1, 4), checkpoint=policy)
    seldom = plan.model_copy(update={"checkpoint": policy.model_copy(update={"interval_seconds": 3600.0})})
    began: list[float] = []
    told = False
    shown: dict[str, float] = {}

    def enough(session: Session) -> bool:
        nonlocal told, shown
        if session._saves.committed_step is not None and not told:
            world.tell(seldom)
            told = True
        if session._saves.interval_seconds == 3600:
            began.append(session._policy._pace._began)
            if session.step % 50 == 0:
                shown = world.status()["progress"] or {}
        return len(began) > 300 and shown.get("saveCostSeconds") is not None

    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with parts.session(total_steps=200_000) as session:
            parts.train(session, enough)
    assert session.step < 200_000
    assert len(set(began)) <= 2, "but for one save that was agreed on just before, none begins any more"
    assert 0 <= shown["saveCostSeconds"] < 60

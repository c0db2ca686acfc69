"""Any interleaving of two operators and the coordinators of their attempts, with crashes and lost, late and doubled
calls, keeps the invariants (Hypothesis).

Profiles: RTJ_HYPOTHESIS=quick (100 examples), ci (5,000; chosen by itself where CI is set), nightly (50,000). In CI the
examples are the same every time (Hypothesis derandomizes there), the nightly ones are new.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import store_world as world
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_actors import FATES, Actor, Crash
from store_world import Save, check_invariants, journal, raw_entries

from trainer_sidecar.contract.journal import Attempt, Manifest
from trainer_sidecar.store import commit
from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.commit import FencedError, SaveAbortedError
from trainer_sidecar.store.fence import Fenced, FenceError, fence_and_pick
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.open import open_store
from trainer_sidecar.store.s3 import S3Store
from trainer_sidecar.store.verify import BadCheckpointError


def profile_in(environ: Mapping[str, str]) -> str:
    in_ci = environ.get("CI", "").lower() not in ("", "0", "false")
    return environ.get("RTJ_HYPOTHESIS") or ("ci" if in_ci else "quick")


PROFILES = {"quick": 100, "ci": 5000, "nightly": 50_000}
PROFILE = profile_in(os.environ)
EXAMPLES = PROFILES[PROFILE]
SECONDS = 300 + EXAMPLES // 4
"""Time-out of a search: several times what it takes on two busy cores."""
ALLOWED = (FencedError, FenceError, SaveAbortedError, StoreError, Crash)
SMALL = world.topology(dp=1)


class JournalMachine(RuleBasedStateMachine):
    """The world: a status with the intended attempt, operators that fence for it, coordinators that save and commit."""

    make_store: Callable[[], Store] = staticmethod(MemoryStore)

    def __init__(self) -> None:
        super().__init__()
        self.store: Store = self.make_store()
        self.actors: list[Actor] = []
        self.late: list[Callable[[], Any]] = []
        self.nonce = 1
        self.known = 0
        self.fenced: list[Fenced] = []
        self.promised: dict[str, Manifest] = {}
        self.refused: set[str] = set()

    # programs

    def _operate(self, store: Store) -> Fenced:
        request = world.request(
            f"nonce-{self.nonce}",
            plan_for=lambda _restore, _saved: SMALL,
            known_attempts=self.known,
            known_commits=bool(self.promised),
        )
        return fence_and_pick(journal(store), request)

    def _coordinate(self, fenced: Fenced, step: int, tries: int) -> Callable[[Store], Manifest]:
        def program(store: Store) -> Manifest:
            by = journal(store)
            by.read()
            made = Save(store, fenced, step, tries)
            if made.checkpoint in by.history.manifests:
                return by.history.manifests[made.checkpoint]
            made.upload(by.history.parent_for(fenced.epoch))
            return made.commit(by)

        return program

    # rules

    @rule()
    @precondition(lambda self: len(self.actors) < 4)
    def an_operator_looks_at_the_status(self) -> None:
        self.actors.append(Actor(f"operator {self.nonce}", self.store, self._operate))

    @rule()
    @precondition(lambda self: self.known == self.nonce)
    def the_attempt_has_ended_and_the_next_is_intended(self) -> None:
        self.nonce += 1

    @rule(data=st.data(), step=st.integers(1, 3), tries=st.integers(0, 1))
    @precondition(lambda self: self.fenced and len(self.actors) < 4)
    def a_coordinator_saves(self, data: st.DataObject, step: int, tries: int) -> None:
        fenced = data.draw(st.sampled_from(self.fenced))
        busy = {a.name for a in self.actors}
        if f"coordinator {fenced.epoch}" not in busy:  # one save in flight per epoch
            name = f"coordinator {fenced.epoch}"
            self.actors.append(Actor(name, self.store, self._coordinate(fenced, step, tries)))

    @rule(data=st.data(), steps=st.integers(1, 8))
    @precondition(lambda self: self.actors)
    def an_actor_goes_on(self, data: st.DataObject, steps: int) -> None:
        actor = data.draw(st.sampled_from(self.actors))
        for _ in range(steps):
            if not actor.done:
                actor.step()
        self._reap()

    @rule(data=st.data(), fate=st.sampled_from(FATES[1:]))
    @precondition(lambda self: self.actors)
    def a_call_goes_wrong(self, data: st.DataObject, fate: str) -> None:
        actor = data.draw(st.sampled_from(self.actors))
        actor.step(fate)
        self.late += actor.late
        actor.late = []
        self._reap()

    @rule(data=st.data())
    @precondition(lambda self: self.actors)
    def an_actor_dies(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.actors)).crash()
        self._reap()

    @rule(data=st.data())
    @precondition(lambda self: self.late)
    def a_late_call_arrives(self, data: st.DataObject) -> None:
        act = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        try:
            act()
        except StoreError:
            return

    def _reap(self) -> None:
        for actor in [a for a in self.actors if a.done]:
            self.actors.remove(actor)
            if actor.error is not None:
                if not isinstance(actor.error, ALLOWED):
                    raise actor.error
            elif isinstance(actor.result, Manifest):
                self.promised[actor.result.checkpoint_id] = actor.result
            else:
                self.known = max(self.known, actor.result.attempt)
                if all(f.epoch != actor.result.epoch for f in self.fenced):
                    self.fenced.append(actor.result)

    # what must hold

    @invariant()
    def the_journal_is_right(self) -> None:
        check_invariants(self.store)

    @invariant()
    def nothing_that_was_promised_is_lost(self) -> None:
        entries = raw_entries(self.store)
        assert all(m in entries for m in self.promised.values())
        assert all(f.entry in entries for f in self.fenced)
        assert sum(isinstance(e, Attempt) for e in entries) <= self.nonce

    def teardown(self) -> None:
        for actor in self.actors:
            actor.finish()
        self._reap()
        for act in self.late:
            try:
                act()
            except StoreError:
                continue
        check_invariants(self.store)
        self.nothing_that_was_promised_is_lost()


SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    derandomize=PROFILE == "ci",
)


@pytest.mark.timeout(SECONDS)
def test_any_interleaving_with_any_fault_keeps_the_invariants() -> None:
    run_state_machine_as_test(JournalMachine, settings=SETTINGS)


@pytest.mark.timeout(SECONDS)
def test_the_same_rules_hold_on_a_folder(tmp_path: Path) -> None:
    class OnFolder(JournalMachine):
        make_store = staticmethod(lambda: FileStore(tmp_path / uuid.uuid4().hex))

    run_state_machine_as_test(OnFolder, settings=settings(SETTINGS, max_examples=max(4, EXAMPLES // 100)))


@pytest.mark.timeout(SECONDS)
@pytest.mark.s3
def test_the_same_rules_hold_on_a_real_s3_server(s3_endpoint: str) -> None:
    base = open_store("s3://rtj-test/machine", endpoint=s3_endpoint)
    assert isinstance(base, S3Store)

    class OnS3(JournalMachine):
        make_store = staticmethod(
            lambda: S3Store("rtj-test", f"machine/{uuid.uuid4().hex}", base.client, base.once)
        )

    examples = max(2, EXAMPLES // 200)
    run_state_machine_as_test(
        OnS3, settings=settings(SETTINGS, max_examples=examples, stateful_step_count=15)
    )


def drop_r2(patch: pytest.MonkeyPatch) -> None:
    read_back = Journal._read_back

    def another(self: Journal, seq: int, patience: Any) -> Any:
        found = read_back(self, seq, patience)
        if found is None or found.entry is None:
            return found
        return type(found)(seq, found.entry.model_copy(update={"nonce": "another"}))

    patch.setattr(Journal, "_read_back", another)
    patch.setattr(History, "attempt_with", lambda *_: None)


def drop_r4(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "check_epoch", lambda *_: None)


def drop_r9(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(History, "attempt_with", lambda *_: None)


def drop_parts(patch: pytest.MonkeyPatch) -> None:
    """The commit does not wait for the shard to be there."""
    large = MemoryStore.create_large

    def skip(self: MemoryStore, key: str, data: memoryview, **more: Any) -> Any:
        return None if key.endswith(".distcp") else large(self, key, data, **more)

    patch.setattr(MemoryStore, "create_large", skip)


@pytest.mark.parametrize("mutation", [drop_r2, drop_r4, drop_r9, drop_parts])
def test_the_machine_finds_a_protocol_without_its_rules(
    mutation: Callable[[pytest.MonkeyPatch], None],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises((AssertionError, BadCheckpointError)):
            run_state_machine_as_test(
                JournalMachine, settings=settings(SETTINGS, max_examples=300, phases=[Phase.generate])
            )


def test_ci_searches_through_five_thousand_examples_or_more() -> None:
    assert SETTINGS.max_examples == EXAMPLES
    assert PROFILES[profile_in({"CI": "true"})] >= 5000
    assert profile_in({"CI": "true", "RTJ_HYPOTHESIS": "nightly"}) == "nightly"
    assert profile_in({}) == profile_in({"CI": "false"}) == "quick"

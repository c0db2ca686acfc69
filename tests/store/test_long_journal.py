"""A journal of 10,000 entries: the newest commit costs few requests with a right hint, and is right with any hint."""

from collections import Counter

import pytest
from store_world import KEYS, fence, journal, save

from trainer_sidecar.contract.journal import Latest
from trainer_sidecar.store.faulty import FaultyStore
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.newest import find_newest

ENTRIES = 10_000
NEWEST = ENTRIES - 3


@pytest.fixture(scope="module")
def long() -> MemoryStore:
    """1 attempt, commits, and three holds after the newest commit. Journal only: no shards are needed to find it."""
    store = MemoryStore()
    fenced = fence(store)
    first = save(store, fenced, 1)
    for seq in range(3, ENTRIES + 1):
        if seq <= NEWEST:
            step = seq - 1
            entry = first.model_copy(
                update={
                    "seq": seq,
                    "nonce": f"n{seq}",
                    "step": step,
                    "checkpoint_id": f"{step:012d}-0000000001-00000000",
                }
            )
            store.create(KEYS.journal(seq), entry.to_bytes())
        else:
            store.create(
                KEYS.journal(seq),
                f'{{"schema":1,"seq":{seq},"kind":"Hold","epoch":1,"owner":{{"namespace":"t","uid":"u"}},"writer":"w",'
                f'"nonce":"n{seq}","time":0,"checkpointId":"x","holder":"h"}}'.encode(),
            )
    return store


def hint(sequence: int) -> bytes:
    return Latest(
        sequence=sequence, checkpoint_id=f"{sequence - 1:012d}-0000000001-00000000", step=1
    ).to_bytes()


def test_with_a_right_hint_it_takes_one_list_and_few_gets(long: MemoryStore) -> None:
    long.put(KEYS.latest, hint(NEWEST))
    counted = FaultyStore(long)
    newest = find_newest(journal(counted))
    assert newest is not None
    assert newest.seq == NEWEST
    calls = Counter(op for op, _ in counted.calls)
    assert calls == {"list": 1, "get": 1 + (ENTRIES - NEWEST + 1) + 1}


@pytest.mark.parametrize(
    "latest",
    [
        hint(NEWEST - 50),
        hint(ENTRIES + 500),
        hint(ENTRIES),
        hint(1),
        b'{"sequence": 12, "checkpointId": "another", "step": 1}',
        b'{"sequence": -3, "checkpointId": "x", "step": 1}',
        b"\x00garbage",
        None,
    ],
    ids=[
        "stale",
        "ahead",
        "no commit there",
        "an attempt",
        "another commit",
        "negative",
        "garbage",
        "missing",
    ],
)
def test_whatever_the_hint_says_the_newest_is_found(long: MemoryStore, latest: bytes | None) -> None:
    long.delete([KEYS.latest])
    if latest is not None:
        long.put(KEYS.latest, latest)
    newest = find_newest(journal(long))
    assert newest is not None
    assert newest.seq == NEWEST


def test_the_whole_is_read_contiguously(long: MemoryStore) -> None:
    history = journal(long).read()
    assert history.tail == ENTRIES
    assert len(history.manifests) == NEWEST - 1
    assert history.gap is None


def test_nothing_committed_is_none() -> None:
    store = MemoryStore()
    assert find_newest(journal(store)) is None
    fence(store)
    assert find_newest(journal(store)) is None

"""`rtj gc` deletes only what no attempt can use any more, and says why; `rtj store probe` refuses bad stores."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import store_world as world

from trainer_sidecar import cli
from trainer_sidecar.store.memory import MemoryStore

if TYPE_CHECKING:
    from conftest import Run


def test_a_sweep_takes_orphans_of_fenced_epochs_and_leaves_the_running_one_alone(run: Run) -> None:
    orphan = world.Save(run.store, run.fenced, 9).upload()
    assert run.rtj("gc") == "nothing to show\n", "its epoch is the newest: it may still commit"
    second = world.fence(run.store, "nonce-2")
    running = world.Save(run.store, second, 10).upload()
    (row,) = run.json("gc", "--dry-run")
    assert (row["checkpoint"], row["action"]) == (orphan.checkpoint, "delete")
    assert row["why"] == "never committed, epoch 1 is fenced"
    assert row["objects"] > 0
    assert list(run.store.list(world.KEYS.checkpoint(orphan.checkpoint))), "a dry run deletes nothing"
    (row,) = run.json("gc")
    assert (row["checkpoint"], row["objects left"]) == (orphan.checkpoint, 0)
    assert not list(run.store.list(world.KEYS.checkpoint(orphan.checkpoint)))
    assert list(run.store.list(world.KEYS.checkpoint(running.checkpoint)))
    run.rtj("checkpoints", "verify", "all", "--deep")


def test_retiring_needs_the_word_that_no_attempt_runs(run: Run) -> None:
    run.commit(4)
    tail = run.history().tail
    run.rtj("gc", "--keep-last", "2", code=2)
    assert "attempt 1 (epoch 1" in run.said
    assert "may still run" in run.said
    assert run.history().tail == tail
    rows = run.json("gc", "--keep-last", "2", "--dry-run")
    assert [(r["checkpoint"], r["action"]) for r in rows] == [(i, "retire") for i in run.ids[:2]]
    assert "needs --no-attempt-runs" in rows[0]["why"]
    rows = run.json("gc", "--keep-last", "2", "--no-attempt-runs")
    assert [r["checkpoint"] for r in rows] == run.ids[:2]
    assert set(run.history().retired) == set(run.ids[:2])
    assert not list(run.store.list(world.KEYS.checkpoint(run.ids[0])))


def test_frozen_weights_go_only_with_that_word_and_once_no_checkpoint_names_them(run: Run) -> None:
    data = b"weights that never train"
    named = hashlib.sha256(data).hexdigest()
    run.store.create_large(world.KEYS.frozen(named), memoryview(data))
    run.store.create(world.KEYS.frozen_leaves(named), b"digests")
    assert run.rtj("gc") == "nothing to show\n"
    (row,) = run.json("gc", "--dry-run")
    assert (row["checkpoint"], row["action"], row["objects"], row["bytes"]) == (
        f"frozen/{named}",
        "delete",
        2,
        len(data) + 7,
    )
    assert row["why"] == "no unretired checkpoint names it; needs --no-attempt-runs"
    (row,) = run.json("gc", "--dry-run", "--no-attempt-runs")
    assert row["why"] == "no unretired checkpoint names it"
    assert len(list(run.store.list(world.KEYS.frozen_prefix))) == 2
    manifest = world.KEYS.manifest(run.ids[0])
    was = run.store.get(manifest)
    run.store.put(manifest, b"{}")
    (row,) = run.json("gc", "--no-attempt-runs", code=1)
    assert (row["checkpoint"], row["objects left"]) == ("frozen/", 2)
    assert run.ids[0] in row["why"]
    run.store.put(manifest, was)
    (row,) = run.json("gc", "--no-attempt-runs")
    assert (row["checkpoint"], row["objects left"]) == (f"frozen/{named}", 0)
    assert not list(run.store.list(world.KEYS.frozen_prefix))


def test_what_is_pinned_and_the_restore_point_stay(run: Run) -> None:
    run.rtj("checkpoints", "pin", run.ids[0])
    second = world.fence(run.store, "nonce-2")
    assert second.restore is not None
    for step in (4, 5, 6):
        run.commits.append(world.save(run.store, second, step))
    run.rtj("gc", "--keep-last", "2", "--no-attempt-runs")
    assert set(run.history().retired) == {run.ids[1], run.ids[3]}, "pinned 1 and restore point 3 stay"


def test_a_policy_that_would_leave_one_is_refused(run: Run) -> None:
    run.rtj("gc", "--keep-last", "1", "--dry-run", code=2)
    assert "below 2" in run.said
    run.rtj("gc", "--keep-every-steps", "5", "--dry-run", code=2)


def test_gc_of_a_run_that_does_not_exist_is_refused_and_names_those_that_do(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gc", "--store", run.url, "--run-id", "nobody"]) == 2
    said = capsys.readouterr().err
    assert f"no run local/nobody in {run.url}" in said
    assert world.KEYS.run_id in said


def test_gc_of_a_damaged_journal_deletes_nothing(run: Run) -> None:
    before = {o.key for o in run.store.list("")}
    run.store.put(world.KEYS.journal(run.fenced.epoch), b"{ torn")
    run.rtj("gc", code=1)
    assert "proves that an attempt stood there" in run.said
    assert {o.key for o in run.store.list("")} == before


def test_a_probe_shows_every_check_and_leaves_nothing(run: Run) -> None:
    rows = run.json("store", "probe")
    assert all(r["passed"] for r in rows), rows
    assert "conditional create" in {r["check"] for r in rows}
    assert not [o.key for o in run.store.list("") if "probe" in o.key]


def test_a_probe_refuses_a_store_that_overwrites(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Careless(MemoryStore):
        def create(self, key: str, data: bytes) -> None:
            self.put(key, data)

    monkeypatch.setattr("trainer_sidecar.commands.store.open_store", lambda *_, **__: Careless())
    assert cli.main(["store", "probe", "--store", "s3://bucket/x"]) == 69
    assert "ignores If-None-Match" in capsys.readouterr().out

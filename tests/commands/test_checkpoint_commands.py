"""`rtj checkpoints` at a store, without a cluster: tables, JSON, verdicts with names, exit codes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import store_world as world

from trainer_sidecar import cli
from trainer_sidecar.commands.progress import Progress
from trainer_sidecar.commands.table import text_of
from trainer_sidecar.contract.journal import Quarantined, Reinstated, Verified
from trainer_sidecar.contract.keys import RunKeys, parse_checkpoint_id

if TYPE_CHECKING:
    from conftest import Run


def test_list_names_the_resume_point_and_who_holds_what(run: Run) -> None:
    run.rtj("checkpoints", "pin", run.ids[0], "--by", "ada")
    rows = run.json("checkpoints", "list")
    assert [r["step"] for r in rows] == [3, 2, 1]
    assert [r["state"] for r in rows] == ["resume point", "", ""]
    assert rows[2]["held by"] == ["user ada"]
    assert "user ada" in run.rtj("checkpoints", "list")


def test_verify_looks_at_the_newest_and_deep_says_how_fast(run: Run) -> None:
    (row,) = run.json("checkpoints", "verify")
    assert (row["checkpoint"], row["level"], row["verdict"]) == (run.ids[2], "ingest", "good")
    (row,) = run.json("checkpoints", "verify", "--deep")
    assert (row["level"], row["verdict"]) == ("bytes", "good")
    assert row["bytes"] == run.commits[2].bytes
    assert row["rate"].endswith(" MB/s")
    assert "MB/s" in run.rtj("checkpoints", "verify", "all", "--deep")
    assert run.history().tail == 4, "nothing is recorded unless asked for"


def test_a_flipped_byte_is_found_by_deep_alone_and_recorded_with_a_name(run: Run) -> None:
    key = world.KEYS.shard(run.ids[2], 1)
    run.flip(key)
    if run.url.startswith("file:"):  # a store that vouches for no checksum sees nothing without reading
        assert run.json("checkpoints", "verify")[0]["verdict"] == "good"
    (row,) = run.json("checkpoints", "verify", "--deep", "--record", "--by", "ada", code=1)
    assert row["verdict"] == "bytes: rank-00001.distcp"
    assert "leaf 0" in row["found"]
    (entry,) = [e for e in run.history().entries if isinstance(e, Quarantined)]
    assert (entry.checkpoint_ids, entry.fault, entry.file) == ([run.ids[2]], "bytes", "rank-00001.distcp")
    assert (entry.detail["by"], entry.detail["reads"]) == ("ada", 2)
    assert entry.owner == run.fenced.entry.owner
    point = run.history().newest_restorable
    assert point is not None
    assert point.checkpoint_id == run.ids[1]
    (row,) = run.json("checkpoints", "verify", "--deep", "--record", "--by", "ada")
    assert row["checkpoint"] == run.ids[1], "newest is what a resume takes now"
    (verified,) = [e for e in run.history().entries if isinstance(e, Verified)]
    assert (verified.level, verified.detail["by"]) == ("bytes", "ada")


def test_a_missing_object_is_bad_without_reading_a_byte(run: Run) -> None:
    run.store.delete([world.KEYS.part(run.ids[0], 0)])
    rows = run.json("checkpoints", "verify", "all", code=1)
    assert [r["verdict"] for r in rows] == ["missing: parts/rank-00000.json", "good", "good"]


def test_a_store_that_is_away_says_nothing_about_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    where = ["--store", "s3://bucket/x", "--run-id", "job", "--endpoint", "http://127.0.0.1:9"]
    assert cli.main(["checkpoints", "verify", "--deep", *where]) == 69
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_pin_is_a_hold_that_another_person_does_not_lift_by_accident(run: Run) -> None:
    run.rtj("checkpoints", "pin", "newest", "--by", "ada")
    run.rtj("checkpoints", "pin", "newest", "--by", "ada")
    assert run.history().holds == {run.ids[2]: frozenset({"user ada"})}
    assert run.history().tail == 5, "pinned twice, appended once"
    run.rtj("checkpoints", "unpin", run.ids[2], "--by", "bob", code=2)
    assert "it is held by: user ada" in run.said
    run.rtj("checkpoints", "unpin", run.ids[2], "--by", "bob", "--holder", "user ada")
    assert not run.history().holds


def test_quarantine_and_reinstate_stand_in_the_journal_with_reason_and_person(run: Run) -> None:
    (row,) = run.json(
        "checkpoints", "quarantine", run.ids[1], "--reason", "loss spike", "--descendants", "--by", "ada"
    )
    assert row["a resume takes"] == run.ids[0]
    assert set(run.history().quarantined) == set(run.ids[1:])
    run.rtj("checkpoints", "reinstate", run.ids[2], "--reason", "fine", "--by", "ada", code=2)
    assert "covered by the quarantine of its ancestor" in run.said
    run.json("checkpoints", "reinstate", run.ids[1], "--reason", "looked at it", "--by", "bob")
    entries = run.history().entries
    said, again = entries[-3:-1]
    assert isinstance(said, Quarantined)
    assert (said.reason, said.detail) == ("loss spike", {"by": "ada"})
    assert isinstance(again, Quarantined), "written twice, so that no damaged object undoes it"
    assert (again.checkpoint_ids, again.detail["repeats"]) == (said.checkpoint_ids, said.seq)
    assert isinstance(entries[-1], Reinstated)
    assert (entries[-1].by, entries[-1].reason) == ("bob", "looked at it")
    point = run.history().newest_restorable
    assert point is not None
    assert point.checkpoint_id == run.ids[2]


def test_reinstating_needs_a_person_by_name(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.rtj("checkpoints", "reinstate", run.ids[1], "--reason", "x")
    assert ended.value.code == 2
    assert "--by" in capsys.readouterr().err


def test_what_was_never_committed_is_refused_with_the_newest_commits(run: Run) -> None:
    run.rtj("checkpoints", "pin", "000000000009-0000000001-00000000", code=2)
    assert "was never committed" in run.said
    assert run.ids[2] in run.said
    run.rtj("checkpoints", "verify", "nonsense", code=2)
    assert "is not a checkpoint id" in run.said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_shows_on_a_terminal_only() -> None:
    for out, shown in ((Terminal(), True), (io.StringIO(), False)):
        with Progress("reading", 200, out) as progress:
            progress.add(100)
        assert ("50%" in out.getvalue()) == shown, out.getvalue()
        assert progress.done == 100


def test_a_run_that_is_not_there_is_said_with_those_that_are(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    there = f"{world.KEYS.namespace}/{world.KEYS.run_id}"
    for words in (["checkpoints", "list"], ["checkpoints", "show", "newest"], ["journal", "tail"]):
        assert cli.main([*words, "--store", run.url, "--run-id", "typo"]) == 2
        said = capsys.readouterr().err
        assert f"no run local/typo in {run.url}" in said
        assert said.endswith(f"it has {there}\n")


def test_many_runs_are_named_in_part(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(12):
        run.store.put(f"a/r-{i:02}/journal/1.json", b"x")
        run.store.put(f"a/r-{i:02}/checkpoints/x", b"x")
    assert cli.main(["checkpoints", "list", "--store", run.url, "--run-id", "typo"]) == 2
    assert "it has a/r-00, a/r-01, " in (said := capsys.readouterr().err)
    assert said.endswith(", a/r-07, ...\n")


def test_show_prints_no_python(run: Run) -> None:
    shown = run.rtj("checkpoints", "show")
    assert shown == run.rtj("checkpoints", "show", "newest")
    assert f"checkpoint:     {run.ids[2]}" in shown
    assert "held by:        -" in shown
    assert "[" not in shown


def test_an_option_that_is_unknown_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--nprocs", "2"]) == 2
    assert "unrecognized arguments: --nprocs: see rtj run --help" in capsys.readouterr().err
    assert cli.main(["checkpoints", "list", "--store", "file:///x", "--run-id", "x", "--all"]) == 2
    assert "--all: see rtj checkpoints list --help" in capsys.readouterr().err


def test_looking_for_a_run_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "not mounted"
    for words in (["checkpoints", "list"], ["journal", "tail"], ["gc"]):
        assert cli.main([*words, "--store", f"file://{folder}", "--run-id", "typo"]) == 69, words
        assert "mount it, or correct --store" in capsys.readouterr().err
    assert not folder.exists()


def test_a_retired_checkpoint_is_called_retired_and_not_bad(run: Run) -> None:
    run.commit(4)
    run.rtj("gc", "--keep-last", "2", "--no-attempt-runs")
    for action in ("show", "verify"):
        run.rtj("checkpoints", action, run.ids[0], code=2)
        assert "is retired: its objects are deleted" in run.said


def test_a_damaged_journal_is_said_by_the_commands_that_only_read(run: Run) -> None:
    run.store.put(world.KEYS.journal(run.fenced.epoch), b"{ torn")
    run.rtj("checkpoints", "list")
    assert "proves that an attempt stood there" in run.said


def test_an_entry_that_cannot_be_read_shows_in_list_and_tail_and_a_person_may_answer_for_a_checkpoint(
    run: Run,
) -> None:
    run.rtj("checkpoints", "quarantine", "newest", "--reason", "diverged", "--by", "ada")
    torn = run.history().tail
    run.store.put(world.KEYS.journal(torn), b"{ torn")
    rows = run.json("checkpoints", "list")
    assert {r["state"] for r in rows} == {f"in doubt (entry {torn} cannot be read)"}
    assert "3 checkpoints from before it are not used" in run.said
    assert "unreadable" in run.rtj("journal", "tail").splitlines()[-1]
    assert run.json("journal", "tail")[-1]["kind"] == "unreadable"
    run.rtj("checkpoints", "reinstate", run.ids[1], "--reason", "it was the one after", "--by", "ada")
    assert [r["state"] for r in run.json("checkpoints", "list")][1] == "resume point"


@pytest.mark.parametrize("text", ["", " ", "two\nlines", "\x1b[31mred", "\udcff", "x" * 1001])
def test_what_goes_into_the_journal_for_people_is_one_line_of_text(run: Run, text: str) -> None:
    tail = run.history().tail
    for words in (["quarantine", "newest", "--reason", text], ["pin", "newest", "--by", text]):
        with pytest.raises(SystemExit) as ended:
            run.rtj("checkpoints", *words)
        assert ended.value.code == 2
    assert run.history().tail == tail


def test_a_cell_never_reaches_the_terminal_as_a_command() -> None:
    assert text_of("ada\x1b[31m\n") == "ada\\x1b[31m\\n"
    assert text_of(["ä", "b"]) == "ä,b"


@pytest.mark.parametrize("lines", ["0", "-1"])
def test_a_tail_of_nothing_is_refused(run: Run, lines: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run.rtj("journal", "tail", "-n", lines)
    assert ended.value.code == 2


@pytest.mark.parametrize("name", ["run\n", "run/x", "..", "rün", "", "x" * 129, "\u0661"])
def test_a_name_that_could_leave_its_prefix_is_no_run(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a store key"):
        RunKeys("team", name)
    with pytest.raises(ValueError, match="is not a checkpoint id"):
        parse_checkpoint_id(f"000000000009-0000000001-00000000{name}" if name else name)

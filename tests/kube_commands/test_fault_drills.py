"""`rtj drill faults`: a drill passes only when its fault is proven and all that was stated holds; the page says so."""

from __future__ import annotations

import html.parser
import json
import shlex
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import store_world as world
from cluster_desk import Desk

from rtj_operator.admission import admit
from rtj_operator.api.effective import OperatorDefaults
from rtj_operator.api.validation import validate
from trainer_sidecar.audit.journal import read_entries
from trainer_sidecar.cli import EXIT_USAGE, build_parser
from trainer_sidecar.contract.fault_order import FAULT_ANNOTATION, FAULT_LABEL, FAULT_LABEL_VALUE, check
from trainer_sidecar.contract.journal import Attempt, Cause, Entry
from trainer_sidecar.contract.ledger import LedgerStep
from trainer_sidecar.faultdrills import measure
from trainer_sidecar.faultdrills.campaign import one, told
from trainer_sidecar.faultdrills.catalogue import DRILLS, LIMITS, Drill, chosen
from trainer_sidecar.faultdrills.outcome import (
    Campaign,
    Check,
    DrillResult,
    Loss,
    Seen,
    Verdict,
    judge,
)
from trainer_sidecar.faultdrills.page import bars, page
from trainer_sidecar.faultdrills.scratch import Scratch
from trainer_sidecar.faultdrills.settings import Settings
from trainer_sidecar.faultdrills.stage import DrillError, NotRunError, Stage
from trainer_sidecar.faultdrills.trail import Trail
from trainer_sidecar.kube_commands.drill import DEFAULT_KEY
from trainer_sidecar.store.open import open_store

GOOD = Seen(
    fired="SIGKILL to rank 0",
    checks=[Check(name="each sample exactly once", holds=True, seen="80 samples")],
    lost=Loss(steps=4, samples=32, seconds=2.5),
    recovery_seconds=12.0,
    losses=[(1, 1, 4.0), (1, 2, 3.5), (2, 2, 3.5), (2, 3, 3.0)],
    moments=[(1.5, "commit of step 1")],
)
BAD = Check(name="no <b>zombie</b> commit", holds=False, seen="entry 9 <script>alert(1)</script>")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (GOOD.model_copy(update={"fired": ""}), "the fault was not proven to have happened"),
        (GOOD.model_copy(update={"checks": []}), "nothing was checked"),
        (GOOD.model_copy(update={"checks": [BAD]}), BAD.seen),
        (GOOD.model_copy(update={"lost": None}), "the recovery point was not measured"),
        (GOOD.model_copy(update={"recovery_seconds": None}), "the recovery time was not measured"),
        (GOOD.model_copy(update={"recovery_seconds": 180.1}), "RTO 180.1 s, stated 180 s"),
        (GOOD.model_copy(update={"lost": Loss(steps=1, samples=8, seconds=61)}), "RPO 61.0 s, stated 60 s"),
    ],
)
def test_a_drill_passes_only_when_fault_checks_and_both_times_are_there(seen: Seen, why: str) -> None:
    assert judge(GOOD, LIMITS) == []
    (reason,) = judge(seen, LIMITS)
    assert why in reason


class NoScratch:
    """Where a drill without a job runs."""

    name, cluster = "scratch", None


def ran(run: Any) -> DrillResult:
    drill = Drill("D0", "d0", "Nothing", "nothing happens", "nothing", run)
    return one(drill, LIMITS, NoScratch(), None)  # type: ignore[arg-type]


def test_what_did_not_run_or_broke_off_has_not_passed() -> None:
    def cannot(stage: Stage) -> Seen:
        raise NotRunError("no GPUs")

    def breaks(stage: Stage) -> Seen:
        stage.note("began")
        raise DrillError("no commit within 300 s")

    assert ran(lambda stage: GOOD).verdict is Verdict.PASSED
    missing, broken = ran(cannot), ran(breaks)
    assert (missing.verdict, missing.reasons) == (Verdict.NOT_RUN, ["no GPUs"])
    assert (broken.verdict, broken.reasons) == (Verdict.FAILED, ["no commit within 300 s"])
    assert [text for _, text in broken.seen.moments] == ["began"]
    assert "RTO 12.0 s" in told(ran(lambda stage: GOOD))
    assert not campaign(ran(lambda stage: GOOD), missing).passed
    assert campaign(ran(lambda stage: GOOD)).passed
    assert not campaign().passed


def campaign(*drills: DrillResult) -> Campaign:
    return Campaign(
        started=1_700_000_000, seconds=300, cluster="https://10.0.0.1", namespace="scratch",
        store="s3://bucket/prefix", version="0.1.0", drills=list(drills),
    )  # fmt: skip


def results() -> list[DrillResult]:
    made = []
    for drill, verdict in zip(DRILLS, 5 * list(Verdict), strict=True):
        seen = Seen() if verdict is Verdict.NOT_RUN else GOOD
        if verdict is Verdict.FAILED:
            seen = GOOD.model_copy(update={"checks": [BAD], "recovery_seconds": 400.0})
        made.append(
            DrillResult(
                id=drill.id, title=drill.title, fault=drill.fault, expected=drill.expected,
                limits=LIMITS, verdict=verdict, reasons=[BAD.seen], seconds=60, seen=seen,
            )
        )  # fmt: skip
    return made


class Reader(html.parser.HTMLParser):
    """Notes what is open, and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_loads_nothing_and_names_every_verdict() -> None:
    text = page(campaign(*results()))
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert reader.loads == []
    assert "script" not in reader.tags
    assert "&lt;script&gt;" in text
    for drill in DRILLS:
        assert f'<h2 id="{drill.id}">' in text
    assert "Not passed: 5 passed, 5 failed, 5 not run" in text
    assert "stated" in text


def test_bars_lie_inside_their_picture_and_are_as_long_as_their_numbers() -> None:
    drills = results()
    picture = ElementTree.fromstring(
        bars(drills, lambda d: d.seen.recovery_seconds, lambda d: d.limits.rto_seconds, "RTO")
    )
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    name = "{http://www.w3.org/2000/svg}"
    boxes = [
        {k: float(r.attrib[k]) for k in ("x", "y", "width", "height")} for r in picture.iter(f"{name}rect")
    ]
    assert len(boxes) == sum(d.seen.recovery_seconds is not None for d in drills)
    assert all(b["x"] + b["width"] < width and b["y"] + b["height"] < height for b in boxes)
    assert boxes[1]["width"] / boxes[0]["width"] == pytest.approx(400 / 12, rel=0.02)
    tops = [b["y"] for b in boxes]
    assert tops == sorted(set(tops)), "no bar lies on another one"
    assert all(0 < float(t.attrib["x"]) < width - 20 for t in picture.iter(f"{name}text"))


def test_the_report_is_read_back_from_its_json_as_it_was_written() -> None:
    made = campaign(*results())
    data = json.loads(made.model_dump_json(by_alias=True))
    assert Campaign.model_validate(data) == made
    assert data["drills"][0]["seen"]["lost"] == {"steps": 4, "samples": 32, "seconds": 2.5}


def test_drills_are_named_by_id_and_d10_means_all_of_its_kinds() -> None:
    assert [d.id for d in chosen(["D3", "d1"])] == ["D1", "D3"]
    assert {d.id for d in chosen(["D10"])} == {d.id for d in DRILLS if d.id.startswith("D10")}
    with pytest.raises(ValueError, match="there is no drill 'D11': use D1, D2"):
        chosen(["D11"])
    assert {d.id.partition("-")[0] for d in DRILLS} == {f"D{n}" for n in range(1, 11)}


def test_what_would_spoil_a_campaign_at_its_end_is_said_before_it_begins(desk: Desk, tmp_path: Path) -> None:
    asked = ("drill", "faults", "D2", "--image", "train:1", "--store", "s3://bucket/drills")
    desk.rtj(*asked, "--to", str(tmp_path / "none" / "report"), code=EXIT_USAGE)
    assert f"there is no folder {tmp_path / 'none'} for the report" in desk.said
    key = str(tmp_path / "key")
    desk.rtj(*asked, "--to", str(tmp_path / "report"), "--fault-key-file", key, code=EXIT_USAGE)
    assert "the fault key cannot be read: " in desk.said


def test_a_trail_takes_each_step_of_a_rank_once_and_skips_what_is_cut_off() -> None:
    trail = quiet_trail()
    line = LedgerStep(
        attempt=1, epoch=3, step=5, rank=1, dp_rank=1, dp=2, samples=[1, 2], loss=0.5, time=time.time()
    )
    text = b"[rank 1] rtj-drill " + line.to_bytes()
    for said in (text, text, text[:-9], b"rtj-drill {}", b"something else"):
        trail.take(said)
    (only,) = trail.told
    assert (only.line, only.at) == (line, 7.0)
    assert trail.steps(3) == [5]
    others = [line.model_copy(update={"step": step, "rank": 0}) for step in (6, 7)]
    trail.take(b"".join(b"rtj-drill " + other.to_bytes() for other in others))
    assert trail.steps(3) == [5, 6, 7]


def test_the_command_says_what_is_missing_before_it_makes_anything(desk: Desk) -> None:
    for words, why in (
        ((), "name the drills, or say --all"),
        (("--all", "D1"), "name the drills, or say --all"),
        (("D11",), "there is no drill 'D11'"),
        (("D1",), "Give -f job.yaml or --image"),
        (("D1", "--image", "trainer"), "Give -f job.yaml or --store"),
    ):
        desk.rtj("drill", "faults", *words, code=2)
        assert why in desk.said


def test_the_page_names_every_drill_and_its_commands_are_commands() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "drills.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("kubectl rtj drill faults ")]
    assert len(lines) == 3
    for line in lines:
        args = build_parser().parse_args(shlex.split(line)[2:])
        assert args.all or chosen(args.drills)
    for drill in DRILLS:
        first, dash, kind = drill.id.partition("-")
        assert f"`{first}" in text
        assert f"-{kind}`" in text or not dash
    for word in (FAULT_LABEL, FAULT_ANNOTATION, DEFAULT_KEY, "FaultsArmed", "FaultsRefused"):
        assert word in text


def quiet_trail() -> Trail:
    class Nothing:
        def pods(self, job: object) -> list[object]:
            return []

    trail = Trail(Nothing(), {}, clock=lambda: 7.0)  # type: ignore[arg-type]
    trail.close()
    return trail


def tell(trail: Trail, epoch: int, step: int, rank: int, samples: list[int], loss: float) -> None:
    line = LedgerStep(
        attempt=1, epoch=epoch, step=step, rank=rank, dp_rank=rank, dp=2, samples=samples, loss=loss,
        time=1000.0 + 100 * epoch + step / 2,
    )  # fmt: skip
    trail.take(b"rtj-drill " + line.to_bytes())


@pytest.fixture
def resumed(tmp_path: Path) -> tuple[Trail, Attempt, Attempt, list[Entry]]:
    """Saved at step 4, told until step 7 (the last one by one rank alone), then again from step 5 to 8, saved."""
    store = open_store(f"file://{tmp_path}/store")
    world.save(store, world.fence(store), 4)
    world.save(store, world.fence(store, "nonce-2", cause=Cause.RANK_FAILED), 8)
    entries = read_entries(store, world.KEYS)
    first, second = (entry for entry in entries if isinstance(entry, Attempt))
    trail = quiet_trail()
    for epoch, steps in ((first.seq, range(1, 7)), (second.seq, range(5, 9))):
        for step in steps:
            for rank in (0, 1):
                tell(
                    trail, epoch, step, rank, [step * 12 + rank * 6 + i for i in range(6)], 8.0 - step + rank
                )
    tell(trail, first.seq, 7, 1, [90], 9.0)
    return trail, first, second, entries


def test_what_was_lost_runs_from_the_restore_point_to_the_last_step_that_a_rank_told(
    resumed: tuple[Trail, Attempt, Attempt, list[Entry]],
) -> None:
    trail, first, second, _ = resumed
    assert measure.lost(trail, first, second) == Loss(steps=3, samples=36, seconds=1.5)
    assert measure.lost(quiet_trail(), first, second) == Loss(steps=0, samples=0, seconds=0)


def test_steps_made_twice_must_have_the_same_samples_and_losses(
    resumed: tuple[Trail, Attempt, Attempt, list[Entry]],
) -> None:
    trail, first, second, _ = resumed
    same = measure.same_losses(trail, first, second, 1e-6)
    assert (same.holds, same.seen[:8]) == (True, "2 steps,")
    for samples, loss, why in (
        ([1], 9.0, "other samples"),
        ([90], 9.1, "9 and 9.05"),
        ([90], float("nan"), "nan"),
    ):
        other = quiet_trail()
        for epoch, rank in ((first.seq, 0), (first.seq, 1), (second.seq, 0)):
            tell(other, epoch, 7, rank, [90], 9.0)
        tell(other, second.seq, 7, 1, samples, loss)
        found = measure.same_losses(other, first, second, 1e-6)
        assert not found.holds
        assert why in found.seen
    assert measure.same_losses(quiet_trail(), first, second, 1e-6).seen == "no step was made twice"


def test_the_audits_find_a_sample_that_was_not_consumed_and_a_commit_that_was_passed_over(
    resumed: tuple[Trail, Attempt, Attempt, list[Entry]],
) -> None:
    trail, _, second, entries = resumed
    assert [c.holds for c in measure.proofs(entries, trail, newest_picked=True)] == [True, True, True]
    lacking = quiet_trail()
    for told_step in trail.told:
        if (told_step.line.epoch, told_step.line.step) != (second.seq, 6):
            lacking.take(b"rtj-drill " + told_step.line.to_bytes())
    (lost,) = (c for c in measure.proofs(entries, lacking, newest_picked=True) if not c.holds)
    assert "step 6 survives" in lost.seen
    numbers = measure.losses(trail, [second])
    assert numbers == [(2, step, 8.5 - step) for step in range(5, 9)]


class Recorder:
    """A cluster that takes a job, and nothing further: the drill ends when it asks the store."""

    namespace = host = "scratch"

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def call(self, method: str, path: str, query: object = None, body: Any = None, *_: Any, **__: Any) -> Any:
        if method == "POST" and path.endswith("/resumabletrainingjobs"):
            self.jobs.append(body)
        return {**(body or {}), "metadata": {"name": "x", "labels": {FAULT_LABEL: FAULT_LABEL_VALUE}}}

    def job(self, name: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "status": {"phase": "Pending"}}

    def pods(self, job: object) -> list[object]:
        return []


class Unasked:
    """A store that ends the drill."""

    def __getattr__(self, name: str) -> Any:
        raise DrillError("the store was asked")


@pytest.mark.parametrize("drill", DRILLS, ids=lambda d: d.id)
def test_the_job_of_each_drill_is_one_that_api_server_and_operator_take(drill: Drill) -> None:
    cluster = Recorder()
    container = {"name": "trainer", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    settings = Settings(
        template={"containers": [container]}, store={"url": "s3://bucket/prefix"}, namespace="scratch",
        fault_key=b"0123456789abcdef", cut_node="cut {node}", heal_node="heal {node}",
    )  # fmt: skip
    result = one(drill, LIMITS, Scratch(cluster, settings), Unasked())  # type: ignore[arg-type]
    assert result.reasons == ["the store was asked"]
    (body,) = cluster.jobs
    meta = body["metadata"] | {"namespace": "scratch", "uid": "u"}
    job = admit({**body, "metadata": meta})
    assert validate(job, OperatorDefaults(allowed_secrets=frozenset({"rtj-store"}))) == []
    orders = job.metadata.annotations.get(FAULT_ANNOTATION)
    assert (orders is not None) == (drill.id in ("D1", "D7", "D9"))
    if orders is not None:
        assert check(b"0123456789abcdef", "scratch", drill.name, orders, time.time())


def test_a_drill_whose_job_is_over_waits_no_longer() -> None:
    class Over(Recorder):
        def job(self, name: str) -> dict[str, Any]:
            return {"status": {"phase": "Failed", "reason": "TooManyFailures", "message": "three in a row"}}

    settings = Settings(template={"containers": []}, store={"url": "s3://b"}, namespace="scratch")
    stage = Stage("d0", Scratch(Over(), settings), Unasked())  # type: ignore[arg-type]
    with pytest.raises(DrillError) as told_why:
        stage.wait("commit", lambda: None)
    assert str(told_why.value) == "no commit; the job is Failed/TooManyFailures: three in a row"

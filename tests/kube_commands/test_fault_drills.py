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
from cluster_desk import Desk

from trainer_sidecar.cli import build_parser
from trainer_sidecar.contract.fault_order import FAULT_ANNOTATION, FAULT_LABEL
from trainer_sidecar.contract.ledger import LedgerStep
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
from trainer_sidecar.faultdrills.stage import DrillError, NotRunError, Stage
from trainer_sidecar.faultdrills.trail import Trail
from trainer_sidecar.kube_commands.drill import DEFAULT_KEY

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


def test_a_trail_takes_each_step_of_a_rank_once_and_skips_what_is_cut_off() -> None:
    class Nothing:
        def pods(self, job: object) -> list[object]:
            return []

    trail = Trail(Nothing(), {}, clock=lambda: 7.0)  # type: ignore[arg-type]
    trail.close()
    line = LedgerStep(
        attempt=1, epoch=3, step=5, rank=1, dp_rank=1, dp=2, samples=[1, 2], loss=0.5, time=time.time()
    )
    text = b"[rank 1] rtj-drill " + line.to_bytes()
    for said in (text, text, text[:-9], b"rtj-drill {}", b"something else"):
        trail.take(said)
    (only,) = trail.told
    assert (only.line, only.at) == (line, 7.0)
    assert trail.steps(3) == [5]


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

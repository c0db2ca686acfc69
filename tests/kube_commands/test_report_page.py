"""`rtj report`: one page that needs nothing else, whose pictures say what journal, witnesses and status say."""

from __future__ import annotations

import html.parser
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import store_world as world
from browser import browser, overlaps
from cluster_desk import Desk
from job_values import NOW, event, job

from trainer_sidecar.contract.checkpoint import Witness, WitnessStep
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.ledger import LedgerStep, ledger_name
from trainer_sidecar.kube_commands.chart_svg import nice_ticks, time_ticks
from trainer_sidecar.kube_commands.report_charts import losses, recovery_points
from trainer_sidecar.kube_commands.report_data import LossPoint, Report, ReportAttempt, ReportCommit
from trainer_sidecar.kube_commands.report_page import page as render
from trainer_sidecar.store.open import open_store

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def page(desk: Desk, tmp_path: Path) -> str:
    """The page of a job with two attempts, four commits and their witnesses; a hostile message among its events."""
    store = open_store(f"file://{tmp_path}/store")
    first = world.fence(store)
    commits = [world.save(store, first, step) for step in (100, 200)]
    second = world.fence(store, "nonce-2", cause=Cause.RANK_FAILED)
    commits += [world.save(store, second, step) for step in (300, 400)]
    for commit in commits:
        seen = [
            WitnessStep(step=commit.step + i, loss=4.0 - commit.step / 200 - i / 100, batch_digest="00")
            for i in (1, 2, 3)
        ]
        witness = Witness(epoch=commit.epoch, checkpoint_id=commit.checkpoint_id, steps=seen)
        store.create(world.KEYS.witness(commit.checkpoint_id), witness.to_bytes())
    desk.server.put(job("run", store=f"file://{tmp_path}/store"))
    desk.server.events = [event("Resumed", '<script>alert("x")</script>', 980, uid="uid-run")]
    path = tmp_path / "page.html"
    assert desk.rtj("report", "run", "--to", str(path)) == f"{path}\n"
    assert desk.said == ""
    return path.read_text()


def pictures(page: str) -> list[ElementTree.Element]:
    parts = page.split("<svg")[1:]
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in parts]


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    class Reader(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.tags: set[str] = set()
            self.addresses: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tags.add(tag)
            self.addresses += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href")]
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    assert reader.addresses == []
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page
    assert "&lt;script&gt;alert" in page


def test_the_pictures_show_attempts_commits_losses_and_what_was_at_risk(page: str) -> None:
    timeline, loss, risk = pictures(page)
    assert len(timeline.findall(f"{SVG}rect")) == 2
    assert len([line for line in timeline.findall(f"{SVG}line") if line.get("class") == "commit"]) == 4
    paths = loss.findall(f"{SVG}path")
    assert [path.findtext(f"{SVG}title") for path in paths] == ["attempt 1", "attempt 2"]
    assert len(loss.findall(f"{SVG}circle")) == 12
    assert "step 401, loss 1.99" in " ".join(title.text or "" for title in loss.iter(f"{SVG}title"))
    assert risk.findall(f"{SVG}path")
    for picture in (timeline, loss, risk):
        width, height = (float(n) for n in str(picture.get("viewBox")).split()[2:])
        for dot in picture.iter(f"{SVG}circle"):
            assert 0 <= float(dot.get("cx") or -1) <= width
            assert 0 <= float(dot.get("cy") or -1) <= height


def test_a_page_replaces_an_earlier_one_of_its_job_and_nothing_else(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    desk.server.put(job("run", store=f"file://{tmp_path}/none"))
    ours = tmp_path / "run.html"
    for _ in range(2):
        assert desk.rtj("report", "run", "--no-store") == "run.html\n"
    ours.write_text("<title>my notes on run</title>")
    desk.rtj("report", "run", "--no-store", code=2)
    assert "run.html is there and is no report of this job: name another file with --to" in desk.said
    assert ours.read_text() == "<title>my notes on run</title>"
    desk.rtj("report", "run", "--no-store", "--to", "run.html")
    assert "<title>team/run</title>" in ours.read_text()


def test_without_the_store_the_page_says_what_is_missing(desk: Desk, tmp_path: Path) -> None:
    desk.server.put(job("run", store=f"file://{tmp_path}/none"))
    path = tmp_path / "page.html"
    desk.rtj("report", "run", "--to", str(path))
    assert "The store was not read" in desk.said
    text = path.read_text()
    assert "with your own credentials" in text
    assert len(pictures(text)) == 1, "a line of training at risk without the commits would be a wrong one"
    told = desk.json("report", "run", "--no-store")
    assert [attempt["attempt"] for attempt in told["attempts"]] == [1, 2]
    assert told["losses"] == []


def test_ledgers_give_the_loss_of_every_step_of_every_attempt(desk: Desk, tmp_path: Path) -> None:
    desk.server.put(job("run"))
    for epoch, steps in ((1, (1, 2, 3)), (3, (3, 4))):
        lines = [
            LedgerStep(
                attempt=1, epoch=epoch, step=step, rank=0, dp_rank=0, dp=1, samples=[step], loss=5.0 - step, time=0
            )
            for step in steps
        ]  # fmt: skip
        name = ledger_name("run", epoch, 0)
        (tmp_path / name).write_text("".join(line.model_dump_json(by_alias=True) + "\n" for line in lines))
    told = desk.json("report", "run", "--no-store", "--ledger", str(tmp_path))
    assert [(p["attempt"], p["step"], p["loss"]) for p in told["losses"]] == [
        (1, 1, 4.0), (1, 2, 3.0), (1, 3, 2.0), (2, 3, 2.0), (2, 4, 1.0),
    ]  # fmt: skip
    desk.rtj("report", "run", "--no-store", "--ledger", str(tmp_path / "none"), code=2)
    assert "no loss of run run there" in desk.said


def test_a_long_run_makes_a_page_that_can_be_mailed() -> None:
    points = [LossPoint(1 + step // 50_000, step, 1 / (1 + step)) for step in range(100_000)]
    assert len(losses(points)) < 200_000
    assert losses([LossPoint(1, 1, float("nan"))]) == ""


def test_the_distance_to_the_last_commit_rises_and_falls_within_an_attempt() -> None:
    start = NOW.timestamp()
    attempts = [
        ReportAttempt(1, "First", start, start + 100, epoch=1),
        ReportAttempt(2, "RankFailed", start + 110, None, epoch=4),
    ]
    commits = [ReportCommit("a", 10, 80, start + 60, 1), ReportCommit("b", 20, 160, start + 130, 4)]
    report = Report("run", "team", start + 150, "Running", "", {}, attempts, commits, [], [], whole=True)
    seen = [None if p is None else (p[0] - start, p[1]) for p in recovery_points(report)]
    assert seen == [
        (0, 0), (60, 60), (60, 0), (100, 40), None,
        (110, 0), (130, 20), (130, 0), (150, 20), None,
    ]  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.001, 0.0013), (-5, 120000), (3, 3)])
def test_ticks_are_round_numbers_within_their_range(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


@pytest.mark.parametrize("reach", [0.5, 45, 4000, 90000, 30 * 86400])
def test_ticks_of_time_are_few_whatever_the_reach(reach: float) -> None:
    assert len(time_ticks(1000.0, 1000.0 + reach)) <= 9


def a_long_report() -> Report:
    """Of a run of days on many nodes: long names, twelve attempts, failures whose words fill lines."""
    start, attempts, commits, points = NOW.timestamp(), [], [], []
    why = (
        "pod llama-3-70b-sft-p3-17-x8k2p on node gpu-node-eu-west-1a-0042: rank 137 ended with exit code 1: "
    )
    for number in range(1, 13):
        begun, epoch, runs = start + number * 14_000, number * 10, number == 12
        outcome = "" if runs else ("Failed", "Lost", "Saved", "")[number % 4]
        attempt = ReportAttempt(
            number, "NodeLost", begun, None if runs else begun + 9000, epoch, number * 10_000
        )
        told = why + "x" * 200 if outcome == "Failed" else ""
        attempts.append(replace(attempt, mesh="dp48xtp8xpp1 zero 1", outcome=outcome, message=told))
        for part in range(6):
            step = number * 10_000 + part * 100
            name, state = f"{step:012d}-{epoch:010d}-1f2e3d4c", "quarantined: " + why * (part == 3)
            commits.append(ReportCommit(name, step, step * 768, begun + part * 900, epoch, "Interval", state))
            points += [LossPoint(number, step + i, 100_000 / step) for i in range(100)]
    seen = {"time": "2026-09-21 14:00:00Z", "type": "Warning", "reason": "CheckpointQuarantined"}
    facts = {"Store": "s3://research-checkpoints-eu/team-a/llama-3-70b-sft", "Step": "123456"}
    head = ("llama-3-70b-sft", "team-a", start + 200_000, "Running", why, facts)
    events = [{**seen, "message": why * 3}]
    return Report(*head, attempts, commits, points, events, whole=True, notes=[why])


@pytest.mark.slow
def test_a_browser_has_no_complaint_and_every_text_can_be_read(page: str, tmp_path: Path) -> None:
    """In a wide and in a small window, light and dark: nothing lies on other text, leaves its picture or is too pale,
    and only tables and pictures are wider than a small window."""
    (tmp_path / "long.html").write_text(render(a_long_report()))
    with browser() as seen:
        for name in ("page", "long"):
            for width, dark in ((1100, False), (420, True)) if name == "long" else ((1100, True),):
                where = f"{name}, {width} px, {'dark' if dark else 'light'}"
                seen.open(f"file://{tmp_path}/{name}.html", width=width, dark=dark)
                texts = seen.texts()
                words = {text["text"] for text in texts}
                assert {"What ran when", "Loss across attempts", "Training at risk"} <= words, where
                assert sum(text["svg"] for text in texts) > 20, where
                assert [t["text"] for t in texts if t["cut"]] == [], where
                assert [(t["text"], t["contrast"]) for t in texts if t["contrast"] < 4.5] == [], where
                assert overlaps(texts) == [], where
                assert seen.width_beyond() == 0, where
                beyond = [t["text"] for t in texts if t["box"][2] > width and not t["scrolls"]]
                assert beyond == [], where
                assert len(seen.screenshot(tmp_path / "shot.png")) > 20_000, where
        assert seen.complaints == []
        assert {address.rpartition("/")[2] for address in seen.asked} == {"page.html", "long.html"}


def test_words_of_a_table_are_not_broken(page: str) -> None:
    assert '<td class="one">Interval</td>' in page
    assert "<td>" not in page

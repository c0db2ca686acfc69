"""The demo's pure parts: phases of an interruption, tables, the overlay, the picture, and the story to be met."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from hack.demo import interruptions, local_scenario, plot, proofs, report  # noqa: E402
from hack.demo.arguments import parse  # noqa: E402
from hack.demo.cluster import write_overlay  # noqa: E402
from hack.demo.faults import rank_pids  # noqa: E402
from hack.demo.settings import OVERLAY, DemoError, Settings  # noqa: E402
from hack.demo.timeline import Phase, table, timeline  # noqa: E402
from hack.demo.watch import Seen  # noqa: E402
from trainer_sidecar.audit.ledger import Ledgers  # noqa: E402
from trainer_sidecar.audit.proof import Proof  # noqa: E402
from trainer_sidecar.contract.journal import Attempt, Cause, Owner  # noqa: E402
from trainer_sidecar.contract.report import Check, ResumeReport  # noqa: E402
from trainer_sidecar.contract.status import PhaseTimes  # noqa: E402
from trainer_sidecar.contract.topology import Batch, Mesh, Topology  # noqa: E402


def attempt(number: int, cause: Cause, dp: int) -> Attempt:
    topology = Topology(
        nodes=dp // 2, ranks_per_node=2, mesh=Mesh(dp=dp),
        batch=Batch(global_batch_size=32, micro_batch_size=4, accumulation=8 // dp),
    )  # fmt: skip
    return Attempt(
        seq=10 * number, epoch=10 * number, owner=Owner(namespace="n", uid="u"), writer="w", nonce=f"n{number}",
        time=1012.5, attempt=number, cause=cause, topology=topology,
    )  # fmt: skip


def test_phases_follow_each_other_and_add_up_to_the_total() -> None:
    line = timeline("node cut off", 100.0, [("detect", 112.0), ("delay", 117.5), ("schedule", 119.0)])
    assert line.phases == [Phase("detect", 12.0), Phase("delay", 5.5), Phase("schedule", 1.5)]
    assert line.total == 19.0


def test_two_observers_that_disagree_make_a_phase_of_no_length_and_never_a_negative_one() -> None:
    line = timeline("x", 100.0, [("detect", 101.0), ("fence and pick", 100.8), ("rendezvous", 103.0)])
    assert [phase.seconds for phase in line.phases] == [1.0, 0.0, 2.0]
    assert line.total == 3.0


def test_a_phase_whose_end_nobody_saw_is_shown_as_unknown_and_the_next_one_includes_it() -> None:
    line = timeline("x", 100.0, [("detect", 101.0), ("rendezvous", None), ("restore", 104.0)])
    assert [phase.seconds for phase in line.phases] == [1.0, None, 3.0]
    assert table([line])[2] == ["rendezvous", "?"]


def test_the_table_has_a_column_per_interruption_and_keeps_the_order_of_the_phases() -> None:
    rows = table(
        [
            timeline("rank killed", 0.0, [("detect", 1.0), ("fence and pick", 1.5)]),
            timeline("node cut off", 0.0, [("detect", 12.0), ("schedule", 14.0), ("fence and pick", 14.25)]),
        ]
    )
    assert [row[0] for row in rows] == ["seconds", "detect", "schedule", "fence and pick", "total"]
    assert rows[2] == ["schedule", "–", "2.0"]
    assert rows[-1] == ["total", "1.5", "14.2"]


def seen() -> Seen:
    found = Seen()
    found.attempts = {2: {"attempt": 2, "endedAt": "1970-01-01T00:16:44.000000Z"}}
    found.placements = {2: {"number": 2, "createdAt": "1970-01-01T00:16:49.000000Z"}}
    found.decided = {
        2: {
            "number": 2,
            "placement": 1,
            "startedAt": "1970-01-01T00:16:40Z",
            "orderedAt": "1970-01-01T00:16:43Z",
        },
        3: {"number": 3, "placement": 2, "startedAt": "1970-01-01T00:16:52.000000Z"},
    }
    found.phases = {30: PhaseTimes(rendezvous=1016.0, restored=1017.0, first_step=1018.0)}
    return found


def test_the_timeline_of_a_lost_node_has_every_phase_of_the_way_back() -> None:
    line = interruptions.node_loss("cut", 1000.0, attempt(3, Cause.NODE_LOST, 2), seen(), Ledgers([]))
    assert [(p.name, p.seconds) for p in line.phases] == [
        ("detect", 4.0), ("delay", 5.0), ("schedule", 3.0), ("fence and pick", 0.5), ("rendezvous", 3.5),
        ("restore", 1.0), ("first step", 1.0),
    ]  # fmt: skip


def test_growing_back_is_timed_from_the_nodes_return_over_the_order_to_save() -> None:
    line = interruptions.growth("back", 1000.0, attempt(3, Cause.RESIZED, 4), seen(), Ledgers([]))
    assert [(p.name, p.seconds) for p in line.phases][:3] == [
        ("detect", 3.0),
        ("save and stop", 6.0),
        ("schedule", 3.0),
    ]


def test_a_story_that_went_otherwise_is_told_attempt_by_attempt() -> None:
    causes = [(Cause.FIRST, 4), (Cause.RANK_FAILED, 4), (Cause.NODE_LOST, 2), (Cause.RESIZED, 4)]
    attempts = [attempt(n, cause, dp) for n, (cause, dp) in enumerate(causes, 1)]
    assert proofs.prove_story(attempts, local_scenario.STORY).holds
    attempts[2] = attempt(3, Cause.HUNG, 4)
    told = str(proofs.prove_story(attempts, local_scenario.STORY))
    assert "cause Hung, expected NodeLost" in told
    assert "ran dp 4 with accumulation 2, expected 2 and 4" in told
    assert "3 attempts instead of 4" in str(proofs.prove_story(attempts[:3], local_scenario.STORY))


def test_a_table_lines_numbers_up_on_the_right_and_words_on_the_left() -> None:
    text = report.render([["step", "note"], ["5", "a"], ["120", "first step after a resume"]])
    assert text.splitlines()[2:] == ["   5  a", " 120  first step after a resume"]


def test_a_failed_proof_is_named_with_what_contradicts_it() -> None:
    text = report.proof_lines([Proof("a", "holds"), Proof("b", "x", {}, [f"c{i}" for i in range(8)])])
    assert text.splitlines() == ["proven  a: holds", "FAILED  b FAILED: c0; c1; c2; c3; c4; and 3 more"]


def overlay_values() -> dict[str, str]:
    names = ["NAMESPACE", "EXAMPLE", "STORE_URL", "IMAGE", "CHECKOUT", "PYTHON_HOME", "LIBRARIES", "LEDGER"]
    return {**{name: name.lower() for name in names}, "INTERVAL_STEPS": "7", "STEPS": "7"}


def test_the_overlay_is_one_patch_and_holds_no_placeholder_once_it_is_written(tmp_path: Path) -> None:
    write_overlay(OVERLAY, tmp_path, overlay_values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kustomization.yaml", "patch.yaml"]
    patch = yaml.safe_load((tmp_path / "patch.yaml").read_text())
    by_path = {step["path"]: step["value"] for step in patch}
    assert by_path["/spec/checkpoint/intervalSteps"] == 7
    assert by_path["/spec/template/spec/containers/0/args"] == ["--steps", "7"]


def test_a_placeholder_without_a_value_is_named(tmp_path: Path) -> None:
    values = overlay_values()
    del values["LEDGER"]
    with pytest.raises(DemoError, match=r"\$\{LEDGER\}"):
        write_overlay(OVERLAY, tmp_path, values)


def test_the_committed_overlay_names_no_folder_of_a_machine() -> None:
    for path in OVERLAY.glob("*.yaml"):
        text = path.read_text()
        assert "/root" not in text
        assert "/home" not in text


def test_too_few_steps_for_the_faults_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--steps", "20", "--interval-steps", "10"], "t")
    assert "use at least 80" in capsys.readouterr().err
    assert parse(["--cut-pod", "0"], "t").cut_pod == 0


def test_each_demo_run_has_a_store_prefix_of_its_own(tmp_path: Path) -> None:
    urls = {Settings(out=tmp_path, run_tag=tag).store_url for tag in ("a", "b")}
    assert len(urls) == 2


def test_no_process_is_taken_for_a_rank_of_a_pod_that_does_not_exist() -> None:
    assert rank_pids("00000000-0000-0000-0000-000000000000") == {}


def test_the_picture_is_drawn_with_lost_steps_and_equal_losses(tmp_path: Path) -> None:
    curve = {step: 5.0 / step for step in range(1, 21)}
    bands = [
        plot.Band("attempt 1", "4 GPUs", "dp 4", "", 0, 10, {11: curve[11]}),
        plot.Band("attempt 2", "2 GPUs", "dp 2", "node cut off", 10, 20, {}),
    ]
    plot.draw(tmp_path / "loss.png", curve, curve, bands, tolerance=1e-3, through="a killed rank")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_check_without_values_says_what_it_is_and_prints_no_null() -> None:
    here = attempt(2, Cause.RANK_FAILED, 4).topology
    checks = [
        Check(name="schedulers", passed=True),
        Check(name="first batch", passed=True, found="a1"),
        Check(name="step", passed=True, expected=30, found=30),
    ]
    resumed = ResumeReport(
        epoch=4, attempt=2, checkpoint_id="c", step=30, topology_from=here, topology_to=here, checks=checks
    )
    assert [row[1:] for row in report.checks_table({4: resumed})[1:]] == [
        ["schedulers", "(compared)", "equal", "yes"],
        ["first batch", "(none saved)", "a1", "yes"],
        ["step", "30", "30", "yes"],
    ]

"""Where something fails, and in which phase of a job's life: the one list of the tests that hold each pair.

`tests/operator/fault_matrix.py --write` (part of `make generate`) makes `docs/faults.md` of it. The tests are read from
their files, with the level that they run at; a pair without a test is an empty cell.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainer_sidecar.sidecar.fault import POINTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"


class Phase(StrEnum):
    """Columns, in the order in which a job meets them."""

    PLACING = "placing"
    STARTING = "starting"
    RESTORING = "restoring"
    TRAINING = "training"
    SAVING = "saving"
    LEAVING = "leaving"
    DELETING = "deleting"


@dataclass(frozen=True)
class Cell:
    """A fault in a phase, and the tests (`file::name` below `tests/`) that hold it. `point`: name of the fault point in
    the code, which one of them must use."""

    part: str
    fault: str
    phase: Phase
    tests: tuple[str, ...]
    point: str = ""


P = Phase
CRASHES = "operator/test_reconcile_crashes.py::"
REAL = "operator/test_operator_on_cluster.py::"
TROUBLE = "operator/test_operator_trouble_on_cluster.py::"
CRASH = (
    CRASHES + "test_a_crash_after_any_write_leaves_nothing_twice",
    REAL + "test_an_operator_killed_after_a_write_leaves_nothing_twice",
)
ALTERED = "operator/test_altered_jobs.py::"
REMOVAL = "operator/test_removal_of_runs.py::"
RIGHTS = "operator/test_missing_rights.py::"
RIGHT = (RIGHTS + "test_a_right_that_the_job_needs_is_in_its_condition_and_event_until_it_is_granted",)
SIDECAR = "sidecar/test_sidecar_crash.py::test_a_save_commits_exactly_once_when_sidecar_and_ranks_are_killed"
D1 = "drills/test_d1_killed_while_saving.py::test_d1_a_coordinator_killed_at_any_point_leaves_a_commit_or_nothing"
D7 = "drills/test_d7_store_away.py::"
D23 = "drills/test_d2_d3_damaged_checkpoint.py::"
MAIN = "cluster/test_cluster_main_path.py::"
SIZE = "operator/test_decide_size.py::"
LIFE = "operator/test_decide_life.py::"
ENDS = "operator/test_attempt_ends.py::"
REFUSED = "operator/test_refused_writes.py::"
GONE = "operator/test_namespace_deleted.py::"
CLOCKS = "operator/test_hangs_and_clocks.py::"
WRONG = "operator/test_wrong_clocks.py::"

OPERATOR, API, STORE, POD, NODE = "operator", "API server", "store", "ranks and sidecar", "pod and node"
CELLS = (
    Cell(OPERATOR, "killed after a status write", P.PLACING, CRASH, "after-status-write"),
    Cell(OPERATOR, "killed after a status write", P.STARTING, CRASH, "after-status-write"),
    Cell(OPERATOR, "killed after the Job was made", P.PLACING, CRASH, "after-job-create"),
    Cell(OPERATOR, "killed after the `Attempt` entry", P.STARTING, CRASH, "after-attempt-entry"),
    Cell(OPERATOR, "killed when one pod had its plan", P.STARTING, CRASH, "after-plan-publish-one-pod"),
    Cell(
        OPERATOR,
        "killed between two deletions of a run",
        P.DELETING,
        (
            REMOVAL + "test_an_operator_that_dies_while_it_deletes_is_followed_by_one_that_goes_on",
            "store/test_removal.py::test_a_removal_that_breaks_off_anywhere_is_finished_by_the_next",
        ),
        "after-removal-part",
    ),
    Cell(
        OPERATOR,
        "stopped, and continued after another took over",
        P.STARTING,
        (
            TROUBLE
            + "test_an_operator_stopped_across_a_fence_and_continued_after_another_took_over_does_nothing_twice",
            "operator/test_leader.py::test_a_replica_that_was_stopped_and_goes_on_knows_at_once_that_it_does_not_lead",
        ),
    ),
    Cell(
        OPERATOR,
        "two at once",
        P.STARTING,
        (CRASHES + "test_two_operators_that_act_at_once_make_one_attempt",),
    ),
    Cell(
        OPERATOR,
        "upgraded, rolled back, uninstalled",
        P.TRAINING,
        (
            "operator/test_chart_life_on_cluster.py::"
            "test_a_job_trains_through_upgrade_rollback_and_uninstall_and_a_new_installation_takes_it_up",
            "operator/test_written_by_another_version.py::"
            "test_a_field_that_an_earlier_version_did_not_write_disturbs_no_job_that_trains",
        ),
    ),
    Cell(OPERATOR, "a right is missing", P.PLACING, RIGHT),
    Cell(OPERATOR, "a right is missing", P.STARTING, RIGHT),
    Cell(
        OPERATOR,
        "a right is missing",
        P.TRAINING,
        (
            RIGHTS + "test_an_action_that_is_refused_again_and_again_is_written_once",
            RIGHTS + "test_pods_that_a_webhook_refuses_to_have_changed_are_said_once",
        ),
    ),
    Cell(
        OPERATOR,
        "a right is missing",
        P.LEAVING,
        (RIGHTS + "test_an_action_that_is_refused_again_and_again_is_written_once",),
    ),
    Cell(
        OPERATOR,
        "a right is missing",
        P.DELETING,
        (RIGHTS + "test_an_action_that_is_refused_again_and_again_is_written_once",),
    ),
    *(
        Cell(
            OPERATOR,
            "the clock is set",
            phase,
            (CLOCKS + "test_a_clock_that_is_set_ends_nothing_and_burns_no_budget",),
        )
        for phase in (P.PLACING, P.STARTING, P.RESTORING, P.TRAINING)
    ),
    Cell(
        OPERATOR,
        "the clock is set",
        P.LEAVING,
        (CLOCKS + "test_a_drain_has_its_time_whatever_the_clock_says_and_no_more",),
    ),
    *(
        Cell(
            OPERATOR,
            "the clock is far ahead for one look",
            phase,
            (WRONG + "test_one_look_with_a_clock_far_ahead_passes_no_deadline",),
        )
        for phase in (P.PLACING, P.TRAINING)
    ),
    Cell(
        OPERATOR,
        "its clock and the API server's differ",
        P.LEAVING,
        (
            "operator/test_seeing.py::test_a_pod_that_stands_after_its_grace_period_is_overdue_by_no_others_clock",
        ),
    ),
    Cell(
        POD,
        "a sidecar says another thing each time",
        P.TRAINING,
        (
            "operator/test_pace.py::test_a_sidecar_that_says_another_thing_each_time_is_asked_no_more_often_for_it",
        ),
    ),
    Cell(
        API,
        "away",
        P.TRAINING,
        (
            TROUBLE
            + "test_without_an_api_server_ranks_train_and_commit_and_the_operator_goes_on_when_it_is_back",
        ),
    ),
    Cell(
        API,
        "answers wrongly, slowly or not at all",
        P.TRAINING,
        (
            "operator/test_bad_api_server_on_cluster.py::"
            "test_a_job_goes_its_way_once_through_every_bad_answer_of_the_api_server",
        ),
    ),
    Cell(
        API,
        "refuses the status",
        P.LEAVING,
        (
            REFUSED + "test_a_suspend_reaches_the_ranks_though_the_status_cannot_be_written",
            REFUSED + "test_what_was_given_up_is_deleted_though_the_status_cannot_be_written",
        ),
    ),
    Cell(
        API,
        "refuses the status",
        P.PLACING,
        (REFUSED + "test_nothing_new_is_begun_that_the_status_cannot_record",),
    ),
    Cell(
        API,
        "the namespace is deleted",
        P.TRAINING,
        (GONE + "test_a_job_whose_pods_go_with_their_namespace_waits_and_is_forgotten_with_it",),
    ),
    Cell(
        API,
        "the namespace is deleted",
        P.DELETING,
        (GONE + "test_a_job_with_its_finalizer_deletes_its_checkpoints_and_lets_the_namespace_go",),
    ),
    Cell(
        API,
        "the object is made again under the same name",
        P.PLACING,
        (
            CRASHES + "test_a_job_of_an_earlier_object_of_the_same_name_makes_room",
            TROUBLE
            + "test_what_users_must_not_see_what_a_tightened_crd_must_not_stop_and_a_name_that_is_used_again",
            "operator/test_refused_edits.py::test_a_run_of_another_object_is_found_before_pods_are_made",
        ),
    ),
    Cell(
        STORE,
        "written by a later version",
        P.STARTING,
        (RIGHTS + "test_a_store_written_by_a_later_version_is_said_once_and_tried_again",),
    ),
    Cell(
        STORE,
        "away",
        P.STARTING,
        (
            CRASHES + "test_a_store_that_cannot_be_reached_is_said_and_tried_again",
            "run/test_run_outage.py::test_an_outage_at_the_fence_is_waited_through_and_shown_and_ctrl_c_ends_the_wait",
        ),
    ),
    Cell(STORE, "away", P.SAVING, (D7 + "test_d7_the_store_is_away_and_training_goes_on",)),
    Cell(
        STORE,
        "slow, or failing at random",
        P.SAVING,
        (D7 + "test_d7_the_store_is_slow_or_fails_at_random_and_nothing_piles_up",),
    ),
    Cell(STORE, "frozen, and awake again", P.SAVING, (D7 + "test_d7_the_server_is_frozen_and_wakes_up",)),
    Cell(
        STORE,
        "answers that say nothing",
        P.SAVING,
        ("sidecar/test_sidecar_trouble.py::test_unclear_answers_of_the_store_still_commit_once",),
    ),
    Cell(
        STORE,
        "refuses to delete",
        P.DELETING,
        (REMOVAL + "test_a_store_that_refuses_is_said_once_tried_again_and_retain_lets_go",),
    ),
    Cell(
        STORE,
        "an object is missing",
        P.RESTORING,
        (D23 + "test_d2_a_deleted_shard_is_refused_and_the_previous_commit_is_used",),
    ),
    Cell(
        STORE,
        "bytes have changed",
        P.RESTORING,
        (D23 + "test_d3_changed_bytes_pass_every_look_and_are_caught_at_the_restore",),
    ),
    *(
        Cell(POD, f"sidecar killed {point.replace('-', ' ')}", P.SAVING, (D1, SIDECAR), point)
        for point in POINTS
    ),
    *(
        Cell(
            POD,
            f"sidecar killed {when} a batch of deletions",
            P.SAVING,
            (
                "sidecar/test_sidecar_retention.py::"
                "test_a_sidecar_killed_while_it_deletes_goes_on_with_it_when_it_comes_back",
            ),
            f"{when}-delete",
        )
        for when in ("before", "after")
    ),
    Cell(
        POD,
        "killed at random",
        P.SAVING,
        ("drills/test_soak_schedules.py::test_random_kills_lose_and_fake_nothing",),
    ),
    Cell(
        POD,
        "a rank is killed while it restores, and the store fails",
        P.RESTORING,
        (
            "cluster/test_cluster_fault_drills.py::"
            "test_a_drill_restores_in_spite_of_the_faults_in_its_spec_and_counts_them",
        ),
    ),
    Cell(
        POD,
        "killed at random, with its node, store, operator and API server",
        P.TRAINING,
        ("cluster/test_cluster_chaos.py::test_a_soak_with_each_kind_of_fault_ends_with_a_clean_audit",),
    ),
    Cell(
        POD,
        "a rank is killed",
        P.TRAINING,
        (
            MAIN + "test_a_killed_rank_is_relaunched_in_the_same_pods_and_the_resume_is_verified",
            REAL + "test_life_of_a_job_from_first_placement_through_kill_scale_and_suspend_to_complete",
            "train/test_kill_matrix.py::test_on_the_same_ranks_every_step_after_every_kill_is_bit_equal",
        ),
    ),
    Cell(
        POD,
        "all ranks are killed with a sealed save",
        P.SAVING,
        (
            "cluster/test_cluster_sealed_save.py::"
            "test_a_sealed_save_is_committed_after_all_ranks_were_killed_and_is_the_next_restore_point",
            "sidecar/test_sidecar_crash.py::test_a_sealed_save_commits_though_all_ranks_died_before_they_could_say_so",
        ),
    ),
    Cell(
        POD,
        "ranks hang",
        P.TRAINING,
        (
            TROUBLE
            + "test_ranks_that_make_no_step_leave_their_stacks_in_the_log_and_the_attempt_ends_as_hung",
            "operator/test_glances.py::"
            "test_a_hang_is_seen_at_the_first_look_after_its_limit_though_progress_is_written_once_a_minute",
        ),
    ),
    Cell(
        POD,
        "ranks hang",
        P.STARTING,
        (SIZE + "test_a_start_that_takes_too_long_has_a_limit_of_its_own_and_shows_its_stacks_too",),
    ),
    Cell(
        POD,
        "ranks hang",
        P.LEAVING,
        (SIZE + "test_a_drain_that_does_not_end_shows_its_stacks_at_its_deadline_and_is_ended",),
    ),
    Cell(
        POD,
        "ranks raise again and again",
        P.TRAINING,
        (
            "cluster/test_cluster_failures.py::test_ranks_that_raise_again_and_again_fail_the_job_with_their_error",
        ),
    ),
    Cell(
        POD,
        "the trainer's memory is used up",
        P.TRAINING,
        ("cluster/test_cluster_failures.py::test_a_trainer_that_takes_too_much_memory_is_told_apart",),
    ),
    Cell(
        POD,
        "the model has changed",
        P.RESTORING,
        (
            "cluster/test_cluster_failures.py::test_a_model_with_another_layer_is_refused_and_every_parameter_is_named",
        ),
    ),
    Cell(
        POD,
        "the operator cannot reach a sidecar",
        P.TRAINING,
        (
            "operator/test_silence.py::"
            "test_a_sidecar_that_nobody_reaches_is_named_with_its_port_and_only_one_that_answers_is_given_up",
        ),
    ),
    Cell(
        POD,
        "pods do not end though the job is over",
        P.LEAVING,
        (
            "operator/test_pods_of_an_ended_job.py::"
            "test_pods_that_do_not_end_are_deleted_after_their_grace_and_an_event_names_them",
        ),
    ),
    Cell(
        POD,
        "a save was on its way",
        P.DELETING,
        (
            REMOVAL + "test_a_save_that_was_on_its_way_does_not_outlive_the_removal",
            "store/test_removal.py::test_a_writer_that_still_runs_cannot_commit_after_the_removal_has_begun",
        ),
    ),
    Cell(
        NODE,
        "a node is cut off",
        P.TRAINING,
        (
            MAIN
            + "test_a_node_that_is_cut_off_makes_the_job_go_on_with_half_the_ranks_and_twice_the_accumulation",
        ),
    ),
    Cell(
        NODE,
        "a node is cut off",
        P.DELETING,
        (REMOVAL + "test_pods_that_nobody_ends_are_left_behind_the_fence",),
    ),
    Cell(
        NODE,
        "a node comes and goes",
        P.TRAINING,
        (
            "operator/test_flapping_node.py::"
            "test_a_node_that_flaps_twenty_times_makes_the_job_smaller_once_and_larger_once_when_it_stays",
        ),
    ),
    Cell(
        NODE,
        "a pod is frozen, and wakes up after the next attempt",
        P.SAVING,
        (
            "drills/test_d9_old_pod_wakes_up.py::"
            "test_d9_a_pod_frozen_before_its_commit_cannot_commit_when_it_wakes_up",
        ),
    ),
    Cell(
        NODE,
        "a pod is deleted by hand",
        P.TRAINING,
        (
            REAL
            + "test_a_pod_deleted_by_hand_saves_and_the_job_goes_on_until_it_is_deleted_with_its_checkpoints",
            ENDS
            + "test_ranks_that_a_deletion_ended_by_sigterm_count_for_nothing_and_a_script_that_failed_does",
        ),
    ),
    Cell(
        NODE,
        "a pod is preempted",
        P.TRAINING,
        (TROUBLE + "test_a_job_that_the_scheduler_preempts_saves_yields_and_comes_back",),
    ),
    Cell(
        NODE,
        "a node is drained",
        P.LEAVING,
        (
            ENDS + "test_all_saved_after_a_sigterm_is_a_saved_end_in_a_lost_placement",
            "cluster/test_cluster_orders.py::"
            "test_a_node_that_is_drained_makes_a_new_placement_elsewhere_that_resumes",
        ),
    ),
    Cell(
        NODE,
        "pods cannot be scheduled",
        P.PLACING,
        (SIZE + "test_pods_that_cannot_be_scheduled_make_the_job_smaller_only_after_the_delay",),
    ),
    Cell(
        NODE,
        "an image cannot be pulled",
        P.PLACING,
        (
            "cluster/test_cluster_failures.py::test_an_image_that_cannot_be_had_is_named_with_what_the_kubelet_said",
        ),
    ),
    Cell(
        NODE,
        "lost nodes are back, and the pods that wait keep off them",
        P.PLACING,
        (
            SIZE
            + "test_a_placement_that_keeps_off_lost_nodes_is_made_anew_without_that_when_it_finds_no_others",
        ),
    ),
    Cell(
        NODE,
        "a busy node starts a sidecar slowly",
        P.PLACING,
        ("operator/test_seeing.py::test_a_sidecar_runs_once_its_startup_probe_has_passed",),
    ),
    Cell(
        NODE,
        "a kubelet misses a plan or an order",
        P.STARTING,
        (
            "operator/test_nudges.py::"
            "test_a_pod_that_has_not_seen_its_plan_is_nudged_after_two_seconds_and_then_after_twice_the_time",
        ),
    ),
    Cell(
        NODE,
        "a kubelet misses a plan or an order",
        P.LEAVING,
        (
            "operator/test_nudges.py::"
            "test_pods_that_have_not_seen_an_order_are_nudged_and_those_that_obey_it_are_not",
        ),
    ),
    Cell(
        NODE,
        "a trainer container is killed, and its peers fail for that",
        P.TRAINING,
        (
            ENDS
            + "test_a_rank_that_failed_since_a_peers_container_was_killed_waits_for_what_the_kubelet_says_of_it",
        ),
    ),
    Cell(
        NODE,
        "a pod's plan is edited by hand",
        P.TRAINING,
        (
            "launch/test_launch_ranks.py::"
            "test_a_plan_that_somebody_has_edited_by_hand_is_refused_by_field_and_ranks_train_on",
        ),
    ),
    Cell(
        NODE,
        "a Job is scaled by hand",
        P.PLACING,
        (ALTERED + "test_a_job_that_is_not_as_it_was_made_is_replaced_before_an_attempt_begins_in_it",),
    ),
    Cell(
        NODE,
        "a Job is scaled by hand",
        P.TRAINING,
        (ALTERED + "test_ranks_that_train_save_first_and_a_pod_too_many_gets_no_plan",),
    ),
    Cell(
        NODE,
        "a Job vanishes",
        P.PLACING,
        (LIFE + "test_a_job_deleted_by_hand_is_a_lost_placement_and_never_created_again_under_its_number",),
    ),
)


@dataclass(frozen=True)
class Found:
    """A test as its file has it."""

    name: str
    level: str
    source: str
    """Text of the test with its decorators and of the module's own constants."""


def tests_in(file: str) -> dict[str, Found]:
    """All test functions of a file below `tests/`, without running or importing it."""
    path = ROOT / "tests" / file
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    head = "\n".join(_text(text, node) for node in tree.body if not isinstance(node, ast.FunctionDef))
    level = _level(file, head)
    return {
        node.name: Found(node.name, level, head + _text(text, node))
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _text(text: str, node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n"


def _level(file: str, head: str) -> str:
    if "mark.cluster" in head or file.startswith("cluster/"):
        return "cluster"
    if file.startswith(("drills/", "sidecar/", "train/", "run/", "launch/")):
        return "processes"
    return "values"


def found(cell: Cell) -> Iterator[Found]:
    """The tests of a cell. Raises KeyError for one that does not exist."""
    for test in cell.tests:
        file, _, name = test.partition("::")
        yield tests_in(file)[name]


HEAD = """# Faults and phases

<!-- Written by `make generate` from tests/operator/fault_matrix.py. Do not edit. -->

What fails, and what the job is doing meanwhile. A cell says how it is tried: **C** on a real Kubernetes cluster,
**P** with real processes and a real store, **V** as values (the decision alone, or the operator with an API server
and a store in memory or a folder). An empty cell has no test of its own. *Leaving* is every planned end: suspend,
resize, new spec, drain. Fault points carry the name that the code gives them; a test whose fault point does not fire
fails. Which test holds which cell stands below the table.

"""


def page() -> str:
    """The page, whole."""
    lines = [HEAD + f"| part | fault | {' | '.join(Phase)} |", "| --- | --- |" + " --- |" * len(Phase)]
    rows = dict.fromkeys((c.part, c.fault) for c in CELLS)
    for part, fault in rows:
        mine = {c.phase: c for c in CELLS if (c.part, c.fault) == (part, fault)}
        point = next((c.point for c in mine.values() if c.point), "")
        shown = fault + (f" (`{point}`)" if point else "")
        lines.append(f"| {part} | {shown} | {' | '.join(_cell(mine.get(p)) for p in Phase)} |")
    lines += ["", "## Tests", ""]
    for part, fault in rows:
        lines.append(f"- {part}, {fault}")
        for cell in (c for c in CELLS if (c.part, c.fault) == (part, fault)):
            lines += [f"  - {cell.phase}: `{test.replace('::', '`, `')}`" for test in cell.tests]
    return "\n".join(lines) + "\n"


def _cell(cell: Cell | None) -> str:
    return "" if cell is None else " ".join(dict.fromkeys(f.level[0].upper() for f in found(cell)))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: fault_matrix.py --write")
    PAGE.write_text(page(), encoding="utf-8")

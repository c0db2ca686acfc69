"""`docs/faults.md` says which faults are tried in which phases: tests that exist, and every fault point there is."""

import pytest
from fault_matrix import CELLS, PAGE, Cell, found, page

from rtj_operator import faults
from trainer_sidecar.sidecar.fault import DELETE_POINTS, POINTS

NAMES = {value: name for name, value in vars(faults).items() if isinstance(value, str)}
GROUPS = {**dict.fromkeys(POINTS, "POINTS"), **dict.fromkeys(DELETE_POINTS, "DELETE_POINTS")}


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make generate`"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.fault}, {cell.phase}")
def test_each_cell_names_tests_that_exist_and_that_use_its_fault_point(cell: Cell) -> None:
    tests = list(found(cell))
    assert tests
    if cell.point:
        words = [cell.point, NAMES.get(cell.point, cell.point), GROUPS.get(cell.point, cell.point)]
        assert any(word in test.source for test in tests for word in words), cell
    assert not any("mark.skip" in test.source or "mark.xfail" in test.source for test in tests)


def test_every_fault_point_of_the_code_is_in_the_matrix() -> None:
    assert {c.point for c in CELLS if c.point} == {*faults.PLACES, *POINTS, *DELETE_POINTS}

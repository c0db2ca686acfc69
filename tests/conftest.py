"""How tests are shared out when several processes run them (`-n 2`), and what a run of all of them has to have shown.

There is one cluster on a machine: all files with tests on it stay in one process, one after the other. They wait most
of the time, so that what the others do meanwhile halves the time of the whole. Any other file stays in one process too,
since its fixtures run torch.

docs/faults.md names the test behind each cell: a run of everything fails unless every one of them has passed in it.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "operator"))

from fault_matrix import CELLS  # noqa: E402


class ByCluster(LoadScopeScheduling):
    """One unit of work for the cluster, one for each other file."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.split("::", 1)[0])


@cache
def unit_of(path: str) -> str:
    """The unit of a test file, by its path below the checkout."""
    on_cluster = re.search(
        r"^pytestmark\b.*\bmark\.cluster\b|^\s*@pytest\.mark\.cluster\b", _text(path), re.MULTILINE
    )
    return "cluster" if on_cluster else path


def _text(path: str) -> str:
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ByCluster(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not isinstance(reporter, TerminalReporter) or not _runs_everything(session.config):
        return
    passed = {report.nodeid.split("[", 1)[0] for report in reporter.stats.get("passed", ())}
    named = {f"tests/{test}" for cell in CELLS for test in cell.tests}
    reporter.line(f"\ndocs/faults.md: {len(named & passed)} of the {len(named)} tests that it names passed")
    for test in sorted(named - passed):
        reporter.line(f"  not {test}")
    if named - passed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _runs_everything(config: pytest.Config) -> bool:
    """Nothing was chosen: no path, no -k, -m, --deselect, --lf, -x, --collect-only, and this is not one worker."""
    chosen = ("keyword", "markexpr", "deselect", "lf", "maxfail", "collectonly")
    if hasattr(config, "workerinput") or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return False
    return not any(config.getoption(name, default=None) for name in chosen)

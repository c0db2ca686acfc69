"""A real Prometheus scrapes a real operator and real sidecars, and answers every query of the dashboard."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from operator_world import ROOT, Place, eventually

sys.path.insert(0, str(ROOT))

from hack.reference.dashboard import queries
from trainer_sidecar.contract.volume import DEFAULT_STATUS_PORT

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
OPERATOR_PORT, PROMETHEUS_PORT = 18080, 19090
INSIDE = [sys.executable, str(ROOT / "hack" / "cluster"), "exec-ns", "cp", "--"]


def test_what_is_served_is_scraped_and_every_query_of_the_dashboard_is_answered(
    place: Place, tmp_path: Path
) -> None:
    place.start(metrics_port=OPERATOR_PORT)
    place.apply("seen", nodes=1, elastic=None)
    place.wait_phase("seen", "Running")
    place.wait_commit("seen")
    with prometheus(place, tmp_path):
        eventually(lambda: _targets_up() == 2, "operator and sidecar are scraped", 60)
        labels = f'{{job_namespace="{place.namespace}",job_name="seen"'
        at_risk = eventually(
            lambda: value(f'rtj_recovery_point_seconds{labels},point="committed"}}'), "age", 60
        )
        assert 0 <= at_risk < 600
        assert eventually(lambda: value(f"checkpoint_last_committed_step{labels}}}"), "a commit", 60) >= 20
        assert value(f'rtj_job_phase{labels},phase="Running"}}') == 1
        assert value("rtj_operator_leader") == 1
        broken = {query: answer for query in queries() if (answer := ask(query))["status"] != "success"}
        assert broken == {}


@contextmanager
def prometheus(place: Place, folder: Path) -> Iterator[None]:
    """Inside the network of the pods; it ends with the block."""
    pods = [(p["status"]["podIP"], p["metadata"]["labels"]) for p in place.pods()]
    sidecars = [
        {
            "targets": [f"{ip}:{DEFAULT_STATUS_PORT}"],
            "labels": {"job_namespace": place.namespace, "job_name": labels["resumabletraining.io/job"]},
        }
        for ip, labels in pods
    ]
    operator = [{"targets": [f"127.0.0.1:{OPERATOR_PORT}"]}]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": "operator", "static_configs": operator},
            {"job_name": "sidecars", "static_configs": sidecars},
        ],
    }
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [
        *INSIDE,
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
    ]
    with (
        (folder / "prometheus.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def ask(query: str) -> dict[str, Any]:
    """The answer of /api/v1/query."""
    url = f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/query?{urlencode({'query': query})}"
    done = subprocess.run(
        [*INSIDE, "curl", "-s", url], capture_output=True, text=True, timeout=60, check=False
    )
    return json.loads(done.stdout) if done.stdout.startswith("{") else {"status": f"no answer: {done.stderr}"}


def value(query: str) -> float | None:
    """The one value of a query; None when there is none yet."""
    answer = ask(query)
    found = answer["data"]["result"] if answer["status"] == "success" else []
    return float(found[0]["value"][1]) if found else None


def _targets_up() -> float | None:
    return value("sum(up)")

"""Write the reference pages and the chart's schema from the code and the values that they describe.

Pages that people copy from must not be typed twice: `make verify` fails when one differs from its source.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

from hack.reference import (  # noqa: E402
    chart_values,
    cli_reference,
    dashboard,
    job_reference,
    library_reference,
    licences_reference,
    metrics_reference,
)

REFERENCE = ROOT / "docs" / "reference"


def pages() -> dict[Path, str]:
    """Text by file."""
    values = (ROOT / "charts" / "rtj-operator" / "values.yaml").read_text()
    return {
        ROOT / "charts" / "rtj-operator" / "values.schema.json": chart_values.schema(values),
        ROOT / "charts" / "rtj-operator" / "files" / "dashboard.json": dashboard.render(),
        REFERENCE / "chart-values.md": chart_values.page(values),
        REFERENCE / "metrics.md": metrics_reference.page(),
        REFERENCE / "job.md": job_reference.page(),
        REFERENCE / "drill.md": job_reference.drill_page(),
        REFERENCE / "events.md": job_reference.words(),
        REFERENCE / "cli.md": cli_reference.page(),
        REFERENCE / "library.md": library_reference.page(),
        REFERENCE / "licences.md": licences_reference.page(),
    }


if __name__ == "__main__":
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)

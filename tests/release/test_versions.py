"""One version, in `trainer_sidecar/__init__.py`: what else carries it agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from trainer_sidecar import __version__

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    "operator": "operator",
    "sidecar": "sidecar",
    "trainer": "trainer",
    "trainer-from-base": "trainer",
}
"""Of the Dockerfile, and what their images are called."""


def test_package_chart_and_images_carry_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "trainer_sidecar/__init__.py"
    chart = yaml.safe_load((ROOT / "charts" / "rtj-operator" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    (label,) = re.findall(r"^ARG VERSION=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert label == __version__
    for page in ("docs/install.md", "examples/pretrain/README.md", "examples/pretrain/Dockerfile"):
        text = (ROOT / page).read_text()
        assert set(re.findall(r"\brtj-(?:operator|sidecar|trainer|pretrain):(\d[\w.]*)", text)) == {
            __version__
        }


def test_every_image_carries_labels_and_its_bill_of_materials() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for target, name in TARGETS.items():
        stage = re.split(rf"^FROM .* AS {target}\n", text, maxsplit=1, flags=re.MULTILINE)[1].partition(
            "\nFROM "
        )[0]
        for key in ("title", "description", "version", "revision", "source", "licenses"):
            assert f"org.opencontainers.image.{key}=" in stage, (target, key)
        if name == "trainer":
            assert f"--name rtj-{name} --installed" in stage
            continue
        assert f"COPY --from=build-{name} /src/sbom /sbom" in stage
        assert f"requirements/{name}.txt --name rtj-{name} --installed > sbom/rtj-{name}.cdx.json" in text

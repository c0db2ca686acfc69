"""A flag or a value of the chart that no job could live with is refused by name, before any job meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rtj_operator import flags
from rtj_operator.main import parse

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "charts" / "rtj-operator" / "values.schema.json").read_text())
BAD = [
    ("--sidecar-cpu", "lots", "quantity above 0"),
    ("--sidecar-cpu", "0.25cores", "quantity above 0"),
    ("--sidecar-cpu", "0", "quantity above 0"),
    ("--sidecar-cpu-limit", "", "quantity above 0"),
    ("--sidecar-memory=-1Gi", "", "'-1Gi', and must be a Kubernetes quantity above 0"),
    ("--sidecar-image", "Not An Image", "an image"),
    ("--sidecar-image", ":1.2.3", "an image"),
    ("--sidecar-pull-policy", "Sometimes", "one of Always, IfNotPresent, Never"),
    ("--sidecar-user", "0", "from 1 to 2147483647"),
    ("--trainer-python", "python3 -u", "a program"),
    ("--namespaces", "a,Bad Name", "name of a namespace"),
    ("--store-endpoint", "ftp://x", "http(s)://host[:port]"),
    ("--store-endpoint", "http://host/path", "http(s)://host[:port]"),
    ("--allowed-endpoints", "http://a,b", "http(s)://host[:port]"),
    ("--allowed-url-prefixes", "file:///ckpt", "s3:// (any bucket), s3://bucket"),
    ("--store-secret", "My_Secret", "name of a Secret"),
    ("--metrics-port", "70000", "from 0 to 65535"),
    ("--metrics-port", "http", "from 0 to 65535"),
    ("--workers", "0", "from 1 to 1024"),
    ("--log-level", "LOUD", "one of DEBUG, INFO, WARNING, ERROR"),
]


@pytest.mark.parametrize(("flag", "value", "wanted"), BAD, ids=lambda v: str(v)[:24])
def test_a_flag_that_cannot_be_is_refused_with_its_value_and_its_form(
    flag: str, value: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([flag] if "=" in flag else [flag, value])
    said, name = capsys.readouterr().err, flag.partition("=")[0]
    variable = "RTJ_OPERATOR_" + name[2:].upper().replace("-", "_")
    assert ended.value.code == 2
    assert f"{name} ({variable}) is " in said
    assert wanted in said.replace("\n", " ")


def test_a_value_of_the_environment_is_refused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTJ_OPERATOR_SIDECAR_MEMORY", "half")
    with pytest.raises(SystemExit):
        parse([])


def test_what_installations_use_is_taken() -> None:
    given = [
        *("--sidecar-cpu", "0.5", "--sidecar-cpu-limit", "1e0", "--sidecar-memory", "1.5Gi"),
        *("--sidecar-image", "[fd00::1]:5000/team/rtj-sidecar:1.2.3@sha256:" + "0" * 64),
        *("--store-endpoint", "http://172.31.77.1:9000", "--allowed-endpoints", "http://a:1/, https://b"),
        *("--allowed-url-prefixes", "s3://ckpt/team-a/,s3://other", "--namespaces", "a, b-2"),
        *("--log-level", "debug", "--metrics-port", "0"),
    ]
    assert parse(given).sidecar_cpu == "0.5"
    for image in (
        "rtj-sidecar:1",
        "localhost/rtj-sidecar:dev",
        "r.example.com:5000/a/b__c/d-e",
        "Host.io/a:T_1",
    ):
        assert re.fullmatch(flags.IMAGE, image), image


def node(path: str) -> dict[str, Any]:
    found = SCHEMA
    for part in path.split("."):
        found = found["properties"][part.removesuffix("[]")]
        found = found["items"] if part.endswith("[]") else found
    return found


def takes(path: str, value: object) -> bool:
    """As JSON schema means it: a pattern is about texts, a least about numbers."""
    form = node(path)
    if isinstance(value, str):
        return "string" in form["type"] and re.search(form.get("pattern", ""), value) is not None
    assert isinstance(value, int | float)
    above = value > form.get("exclusiveMinimum", form.get("minimum", 0) - 1)
    return {"number", "integer"} & {
        *([form["type"]] if isinstance(form["type"], str) else form["type"])
    } != set() and (above and value <= form.get("maximum", value))


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("sidecar.cpu", ["250m", "0.5", 1, 0.25, ".5"], ["lots", "0.25cores", "", "-1", "0m", 0, -1]),
        ("sidecar.cpuLimit", ["1"], ["one"]),
        ("sidecar.memory", ["512Mi", 1073741824, "1e9"], ["-1Gi", "512 Mi", "0"]),
        (
            "image.repository",
            ["rtj-operator", "localhost/a", "r:5000/a/b"],
            ["", "Not An Image", "a:1", "/a"],
        ),
        ("sidecarImage.repository", ["rtj-sidecar"], ["", "Not An Image"]),
        ("sidecarImage.tag", ["", "1.2.3", "dev"], ["a b", "-x"]),
        ("image.digest", ["", "sha256:" + "0" * 64], ["sha256:abc", "0" * 64]),
        (
            "store.endpoint",
            ["", "http://s3:9000", "https://s3.example.com/"],
            ["ftp://x", "s3:9000", "http://a/b"],
        ),
        ("store.secretName", ["rtj-store"], ["", "My_Secret"]),
        ("store.allowedUrls[]", ["s3://ckpt/team-a"], ["ckpt", "s3://a,s3://b"]),
        ("namespaces[]", ["a", "team-1"], ["Bad Name", "", "a.b", "a" * 64]),
        ("metricsPort", [1, 8080, 65535], [0, 70000]),
        ("priorityClassName", ["", "system-cluster-critical"], ["High!"]),
        ("monitoring.podMonitor.interval", ["15s", "1m30s"], ["15", "often"]),
    ],
)
def test_the_charts_schema_takes_what_works_and_nothing_else(
    path: str, good: list[object], bad: list[object]
) -> None:
    assert [v for v in good if not takes(path, v)] == []
    assert [v for v in bad if takes(path, v)] == []

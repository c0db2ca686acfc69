"""The parts of hack/cluster that decide without a cluster: names, parsing, archives, logs, finding processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "hack" / "cluster"
sys.path[:0] = [str(TOOL), str(TOOL.parents[1])]

from hack.cache_folder import cache_folder  # noqa: E402
from localcluster import archives, binaries, forwarder, images, inputs, processes, settings  # noqa: E402


def at(tmp_path: Path) -> settings.Settings:
    return settings.from_environment(
        {"RTJ_CLUSTER_DIR": str(tmp_path / "state"), "RTJ_CACHE": str(tmp_path / "cache")}
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"XDG_CACHE_HOME": "/elsewhere"},
        {"XDG_CACHE_HOME": "/elsewhere", "RTJ_CACHE": "~/ours"},
        {"RTJ_CACHE": "", "XDG_CACHE_HOME": ""},
    ],
)
def test_all_tools_find_the_same_cache(environ: dict[str, str]) -> None:
    found = settings.from_environment(environ).cache
    assert found == cache_folder(environ)
    assert str(found).startswith("/elsewhere") == (environ == {"XDG_CACHE_HOME": "/elsewhere"})


def test_a_port_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(settings.ClusterError, match="RTJ_CLUSTER_S3_PORT='x'"):
        settings.from_environment({"RTJ_CLUSTER_S3_PORT": "x"})


def test_nodes_have_addresses_of_their_own() -> None:
    nodes = settings.node_names(settings.MAX_NODES)
    for attribute in ("name", "netns", "ip", "pod_subnet", "link"):
        assert len({getattr(node, attribute) for node in nodes}) == len(nodes)
    with pytest.raises(settings.ClusterError, match="0 nodes"):
        settings.node_names(0)


@pytest.mark.parametrize(
    "sources",
    [
        "Types: deb\nURIs: http://archive.example/debian\nSuites: bookworm\n",
        "deb http://archive.example/debian bookworm main",
        "deb [signed-by=/k.gpg] http://archive.example/debian bookworm main",
    ],
)
def test_the_mirror_is_the_one_that_apt_uses(sources: str) -> None:
    assert images.debian_mirror(sources) == "http://archive.example/debian"


def test_without_a_debian_source_debootstrap_uses_its_own_default() -> None:
    assert images.debian_mirror("URIs: http://archive.example/debian-security\n") is None


def test_pip_settings_of_the_environment_win_and_paths_of_the_host_stay_out() -> None:
    listed = "global.index-url='https://a.example/root'\nglobal.timeout='9'\n:env:.find-links='/opt/w'\n"
    config = images.pip_config(listed, {"PIP_INDEX_URL": "https://b.example/root"})
    assert "index-url = https://b.example/root" in config
    assert "timeout = 9" in config
    assert "/opt/w" not in config


def test_an_archive_lists_its_layer_by_digest_and_can_drop_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "kept").write_text("1")
    (root / "dropped").write_text("2")
    archive = tmp_path / "a.tar"
    archives.pack(root, "localhost/a:1", {}, archive, keep=lambda m: None if m.name == "./dropped" else m)
    with tarfile.open(archive) as members:
        manifest = json.load(members.extractfile("manifest.json") or sys.stdin)[0]
        config = json.load(members.extractfile(manifest["Config"]) or sys.stdin)
        layer = members.extractfile("layer.tar")
        with tarfile.open(fileobj=layer) as layered:
            names = layered.getnames()
    assert manifest["RepoTags"] == ["localhost/a:1"]
    assert len(config["rootfs"]["diff_ids"]) == len(config["history"]) == 1
    assert sorted(names) == [".", "./kept"]


def test_a_long_log_keeps_its_end_and_its_writer_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"a" * 1000 + b"the end")
        forwarder.trim_logs(tmp_path, limit=100, kept=7)
        writer.write(b", and more")
    assert path.read_bytes() == b"the end, and more"


def test_a_missing_program_is_named_with_the_command_that_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(settings.ClusterError, match=r"kube-apiserver.*kubectl.*hack/cluster build"):
        binaries.require(at(tmp_path))


def test_programs_of_another_folder_are_used_and_do_not_get_into_the_cache_of_built_ones(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "etcd").write_text("")
    (other / "etcd").chmod(0o755)
    environment = {"RTJ_CACHE": str(tmp_path / "cache"), "RTJ_CLUSTER_BIN": str(other)}
    with_other = settings.from_environment(environment)
    assert "etcd" not in {program.name for program in binaries.missing(with_other)}
    assert "etcd" in {program.name for program in binaries.missing(at(tmp_path))}


def test_a_process_is_found_by_record_and_by_mark_and_a_reused_pid_is_not_it(tmp_path: Path) -> None:
    mine = processes.Processes(at(tmp_path))
    record = mine.start(processes.Spec("sleeper", ["sleep", "60"]))
    try:
        assert processes.until(lambda: record.pid in mine.marked(), 5)
        assert mine.record("sleeper") == record
        assert not processes.Record(record.spec, record.pid, record.started - 1).alive
        assert os.getpid() not in mine.marked()
    finally:
        mine.stop(["sleeper"])
    assert not record.alive
    with pytest.raises(settings.ClusterError, match="no process 'other'; there are: sleeper"):
        mine.record("other")


def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    mine = processes.Processes(at(tmp_path))
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    record = mine.start(processes.Spec("stubborn", ["sh", "-c", script]))
    log = at(tmp_path).logs / "stubborn.log"
    assert processes.until(lambda: log.read_text() == "ready\n", 30)
    started = time.monotonic()
    mine.stop(["stubborn"], grace=0.3)
    assert not record.alive
    assert time.monotonic() - started < 30
    processes.kill_until_gone(mine.marked)


def test_help_needs_no_root_and_no_cluster() -> None:
    shown = subprocess.run(
        [sys.executable, str(TOOL), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "base-image" in shown


def test_an_image_is_made_from_what_its_dockerfile_copies_and_from_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    (tmp_path / "package" / "code.py").write_text("1")
    (tmp_path / "lock.txt").write_text("a==1")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM x AS a\nCOPY lock.txt package /src/\nFROM x\nCOPY --from=a /opt /opt\n")
    before = inputs.digest(tmp_path, dockerfile, "tag")
    (tmp_path / "README.md").write_text("not copied")
    (tmp_path / "package" / "__pycache__" / "code.pyc").write_text("not copied either")
    assert before
    assert inputs.digest(tmp_path, dockerfile, "tag") == before
    assert inputs.digest(tmp_path, dockerfile, "other tag") != before
    (tmp_path / "package" / "code.py").write_text("2")
    assert inputs.digest(tmp_path, dockerfile, "tag") != before


@pytest.mark.parametrize(
    "line", ["COPY *.txt /src/", "ADD lock.txt /src/", "COPY gone.txt /src/", "COPY $A /src/"]
)
def test_an_image_whose_inputs_cannot_be_told_is_always_built(tmp_path: Path, line: str) -> None:
    (tmp_path / "lock.txt").write_text("a==1")
    (tmp_path / "Dockerfile").write_text(f"FROM x\n{line}\n")
    assert inputs.digest(tmp_path, tmp_path / "Dockerfile") is None

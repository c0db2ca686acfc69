"""Finds or builds the cluster's programs, all from the Go module proxy.

Each family of programs has a Go module of its own, so that their dependency graphs stay apart; the
roots are pinned here, and Go's minimal version selection makes the rest follow from them. Programs
land in a folder named by a key over this table, one by one, so a build that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localcluster.commands import run, stream
from localcluster.settings import ClusterError, Settings

KUBERNETES = "1.36.2"
_GO = "1.26.0"


@dataclass(frozen=True)
class Program:
    """A program, its main package and how to link it."""

    name: str
    package: str
    ldflags: str = "-s -w"
    tags: str = ""
    cgo: bool = False


@dataclass(frozen=True)
class Family:
    """Programs that share a dependency graph, with the pinned modules that are its roots."""

    name: str
    roots: tuple[tuple[str, str], ...]
    programs: tuple[Program, ...]


def _kubernetes(name: str) -> Program:
    version = "k8s.io/component-base/version"
    ldflags = f"-s -w -X {version}.gitVersion=v{KUBERNETES}"
    return Program(name, f"k8s.io/kubernetes/cmd/{name}", ldflags)


_KUBERNETES_PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
_CONTAINERD = "github.com/containerd/containerd/v2"

FAMILIES = (
    Family(
        "kubernetes",
        (("k8s.io/kubernetes", f"v{KUBERNETES}"),),
        # etcd in the version that Kubernetes itself requires.
        (*map(_kubernetes, _KUBERNETES_PROGRAMS), Program("etcd", "go.etcd.io/etcd/server/v3")),
    ),
    Family(
        "containerd",
        ((_CONTAINERD, "v2.4.2"), ("helm.sh/helm/v4", "v4.3.1")),
        (
            Program("containerd", f"{_CONTAINERD}/cmd/containerd"),
            Program("containerd-shim-runc-v2", f"{_CONTAINERD}/cmd/containerd-shim-runc-v2"),
            Program("ctr", f"{_CONTAINERD}/cmd/ctr"),
            Program("helm", "helm.sh/helm/v4/cmd/helm"),
        ),
    ),
    Family(
        "coredns",
        (("github.com/coredns/coredns", "v1.15.0"),),
        (Program("coredns", "github.com/coredns/coredns"),),
    ),
    Family(
        "versitygw",
        (("github.com/versity/versitygw", "v1.8.0"),),
        (Program("versitygw", "github.com/versity/versitygw/cmd/versitygw"),),
    ),
    Family(
        "runc",
        (("github.com/opencontainers/runc", "v1.5.3"),),
        (
            Program(
                "runc", "github.com/opencontainers/runc", "-s -w -X main.version=1.5.3", "seccomp", cgo=True
            ),
        ),
    ),
)

PROGRAMS = tuple(program for family in FAMILIES for program in family.programs)


def key() -> str:
    """Names the set of programs; another version of any of them gives another key."""
    return hashlib.sha256(repr(FAMILIES).encode()).hexdigest()[:16]


def folder(settings: Settings) -> Path:
    """Where the programs of this table lie; each `RTJ_CLUSTER_BIN` gets a folder of its own."""
    if settings.binaries is None:
        return settings.cache / "bin" / key()
    other = hashlib.sha256(str(settings.binaries).encode()).hexdigest()[:8]
    return settings.cache / "bin" / f"{key()}-{other}"


def missing(settings: Settings) -> list[Program]:
    """Programs that neither the cache nor `RTJ_CLUSTER_BIN` nor, for kubectl, the PATH has."""
    link_found(settings)
    return [program for program in PROGRAMS if not _is_program(folder(settings) / program.name)]


def require(settings: Settings) -> Path:
    """The programs' folder; raises `ClusterError` when some are missing."""
    absent = missing(settings)
    if absent:
        names = ", ".join(program.name for program in absent)
        raise ClusterError(
            f"missing programs: {names}; run `python3 hack/cluster build` (8 minutes on 2 cores)"
        )
    return folder(settings)


def link_found(settings: Settings) -> None:
    """Put links to programs that exist elsewhere into the folder."""
    folder(settings).mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS:
        target = folder(settings) / program.name
        found = _found_elsewhere(settings, program.name)
        if found and not _is_program(target):
            target.unlink(missing_ok=True)
            target.symlink_to(found)


def _found_elsewhere(settings: Settings, name: str) -> Path | None:
    if settings.binaries and _is_program(settings.binaries / name):
        return settings.binaries / name
    own = shutil.which(name) if name == "kubectl" else None
    ours = (settings.cache, settings.state)
    return Path(own) if own and not any(Path(own).is_relative_to(path) for path in ours) else None


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def build(settings: Settings) -> None:
    """Build what is missing, telling the seconds of each."""
    absent = {program.name for program in missing(settings)}
    if absent and shutil.which("go") is None:
        raise ClusterError(
            f"Go {_GO} or newer is needed to build {', '.join(sorted(absent))}; there is none in the PATH"
        )
    for family in FAMILIES:
        wanted = [program for program in family.programs if program.name in absent]
        build_family(family, wanted, modules=settings.cache / "go" / key(), target=folder(settings))


def build_family(family: Family, wanted: Sequence[Program], *, modules: Path, target: Path) -> None:
    """Build programs of a family into `target`; its Go module lies below `modules`."""
    if wanted:
        module = _prepare_module(modules / family.name, family)
        for program in wanted:
            _build_program(target, module, program)


def _prepare_module(module: Path, family: Family) -> Path:
    """Write the family's go.mod and the imports that make its programs' packages part of it."""
    module.mkdir(parents=True, exist_ok=True)
    if not (module / "go.mod").exists():
        lines = [f"module rtj.local/{family.name}", "", f"go {_GO}", ""]
        lines += [f"require {path} {version}" for path, version in family.roots]
        lines += _staging_replacements() if family.name == "kubernetes" else []
        (module / "go.mod").write_text("\n".join(lines) + "\n")
    imports = "".join(f'import _ "{program.package}"\n' for program in family.programs)
    (module / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\n{imports}")
    return module


def _staging_replacements() -> list[str]:
    """Kubernetes requires its staging modules at v0.0.0: point each at the release of the same number."""
    described = json.loads(
        run(["go", "mod", "download", "-json", f"k8s.io/kubernetes@v{KUBERNETES}"], cwd=Path("/"))
    )
    requirements = json.loads(run(["go", "mod", "edit", "-json", described["GoMod"]], cwd=Path("/")))[
        "Require"
    ]
    release = "v0." + KUBERNETES.removeprefix("1.")
    staging = [entry["Path"] for entry in requirements if entry["Version"] == "v0.0.0"]
    return [f"replace {path} => {path} {release}" for path in staging]


def _build_program(target: Path, module: Path, program: Program) -> None:
    started = time.monotonic()
    print(f"building {program.name} ...", file=sys.stderr, flush=True)
    draft = target / f".{program.name}.{os.getpid()}"
    argv = ["nice", "go", "build", "-mod=mod", "-buildvcs=false", "-ldflags", program.ldflags]
    argv += ["-tags", program.tags] if program.tags else []
    env = {**os.environ, "CGO_ENABLED": "1" if program.cgo else "0", "GOFLAGS": "", "GOWORK": "off"}
    try:
        stream([*argv, "-o", str(draft), program.package], cwd=module, env=env)
    except ClusterError as error:
        raise ClusterError(
            f"{program.name} does not build (what is built stays; run `build` again)\n{error}"
        ) from error
    draft.rename(target / program.name)
    print(f"built {program.name} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

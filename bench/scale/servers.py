"""An API server, its etcd and an S3 server of the benchmark's own, on loopback, from the local cluster's programs.

Every request of the operator is in the API server's audit log, and every request to the store in the S3 server's access
log: both are counted from there, not by the operator itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
import urllib3

from hack.cache_folder import cache_folder

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "scale"
ADMIN, OPERATOR = "bench-admin-token", "bench-operator-token"


@dataclass(frozen=True)
class Servers:
    """Where they are, and what they have logged."""

    folder: Path
    api: str
    s3: str

    def kubeconfig(self) -> Path:
        """The operator's own."""
        path = self.folder / "operator.kubeconfig"
        cluster = {"server": self.api, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bench", "cluster": cluster}],
            "users": [{"name": "operator", "user": {"token": OPERATOR}}],
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "operator"}}],
            "current-context": "bench",
        }
        path.write_text(json.dumps(config))
        return path

    def operator_requests(self, since: float, until: float) -> Counter[str]:
        """Requests of the operator between two Unix times, by verb and resource. A watch counts when it begins."""
        found: Counter[str] = Counter()
        for line in (self.folder / "audit.log").read_text().splitlines():
            entry = json.loads(line)
            if not since <= _unix(entry["requestReceivedTimestamp"]) < until:
                continue
            about = entry.get("objectRef") or {}
            part = f"/{about['subresource']}" if about.get("subresource") else ""
            found[f"{entry['verb']} {about.get('resource', entry['requestURI'].split('?')[0])}{part}"] += 1
        return found

    def store_requests(self) -> int:
        """Requests that the S3 server has served."""
        path = self.folder / "s3.log"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def credentials(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench-secret",
            "AWS_REGION": "us-east-1",
        }


def _unix(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def programs() -> Path:
    """The folder with the local cluster's programs; builds them when they are not there."""
    subprocess.run(
        [sys.executable, str(ROOT / "hack" / "cluster"), "build"], check=True, stdout=subprocess.DEVNULL
    )
    cache = cache_folder() / "bin"
    newest = max(cache.iterdir(), key=lambda p: p.stat().st_mtime, default=None)
    if newest is None or not (newest / "kube-apiserver").exists():
        raise FileNotFoundError(f"no kube-apiserver below {cache}: run hack/cluster build")
    return newest


@contextmanager
def serving(folder: Path) -> Iterator[Servers]:
    """All three servers, until the block ends."""
    binaries = programs()
    etcd, peer, api, s3 = (_free_port() for _ in range(4))
    (folder / "tokens.csv").write_text(
        f'{ADMIN},admin,admin,"system:masters"\n{OPERATOR},rtj-operator,operator\n'
    )
    (folder / "audit.json").write_text(json.dumps(_audit_policy()))
    key = folder / "sa.key"
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)], check=True
    )
    for part in ("objects", "metadata"):
        (folder / part).mkdir()
    environment = {**os.environ, "ROOT_ACCESS_KEY": "bench", "ROOT_SECRET_KEY": "bench-secret"}
    commands = [_etcd(folder, etcd, peer), _api(folder, etcd, api), _s3(folder, s3)]
    processes = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as log:
                argv = [str(binaries / command[0]), *command[1:]]
                processes.append(subprocess.Popen(argv, stdout=log, stderr=log, env=environment))
        servers = Servers(folder, f"https://127.0.0.1:{api}", f"http://127.0.0.1:{s3}")
        _wait_ready(servers)
        yield servers
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)


def _etcd(folder: Path, port: int, peer: int) -> list[str]:
    client = f"http://127.0.0.1:{port}"
    urls = [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    peers = [f"--listen-peer-urls=http://127.0.0.1:{peer}"]
    return ["etcd", f"--data-dir={folder}/etcd", *urls, *peers, "--unsafe-no-fsync", "--log-level=warn"]


def _api(folder: Path, etcd: int, port: int) -> list[str]:
    key = folder / "sa.key"
    return [
        "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder}",
        "--service-cluster-ip-range=10.98.0.0/16",
        f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=AlwaysAllow",
        # Nobody makes service accounts here, and pods of placements use none.
        "--disable-admission-plugins=ServiceAccount",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--audit-policy-file={folder}/audit.json",
        f"--audit-log-path={folder}/audit.log",
        "--profiling=false",
    ]


def _s3(folder: Path, port: int) -> list[str]:
    where = [f"--port=127.0.0.1:{port}", "--region=us-east-1", f"--access-log={folder}/s3.log", "--quiet"]
    return ["versitygw", *where, "posix", f"--sidecar={folder}/metadata", f"{folder}/objects"]


def _audit_policy() -> dict[str, object]:
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [{"level": "Metadata", "users": ["rtj-operator"]}, {"level": "None"}],
    }


def _wait_ready(servers: Servers) -> None:
    pool = urllib3.PoolManager(cert_reqs="CERT_NONE")
    urllib3.disable_warnings()
    deadline = time.monotonic() + 120
    while True:
        try:
            answer = pool.request(
                "GET", f"{servers.api}/readyz", headers={"Authorization": f"Bearer {ADMIN}"}, retries=0
            )
            if answer.status == 200:
                break
        except urllib3.exceptions.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"the API server is not ready; see {servers.folder}/kube-apiserver.out")
        time.sleep(0.2)
    keys = servers.credentials()
    boto3.client(
        "s3",
        endpoint_url=servers.s3,
        region_name=keys["AWS_REGION"],
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
    ).create_bucket(Bucket=BUCKET)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])

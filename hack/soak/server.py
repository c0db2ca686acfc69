"""The real S3 server that the schedules run against: versitygw over a folder, on a loopback port."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from hack.cache_folder import cache_folder

ACCESS, SECRET, BUCKET = "rtj-soak", "rtj-soak-secret", "rtj-soak"


class ServerError(Exception):
    """The S3 server cannot be started; the message says what to do."""


class Server:
    """Started by `start`; `stop` ends it. Its data lives in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns once it listens. Raises ServerError when it ends instead, or there is no binary."""
        (self._folder / "data" / BUCKET).mkdir(parents=True)
        (self._folder / "meta").mkdir()
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(_binary(), "--access", ACCESS, "--secret", SECRET, "--port", f"127.0.0.1:{self.port}"),
                    *("posix", "--sidecar", str(self._folder / "meta"), str(self._folder / "data")),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(
                    f"the S3 server ended with {self._process.returncode}, see {self._folder}/log"
                )
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise ServerError(f"the S3 server does not listen on port {self.port} after 20 s")

    def stop(self) -> None:
        """End the server, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def free_port() -> int:
    """A TCP port that was free a moment ago, below those that the kernel hands out to clients by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _binary() -> str:
    named, cache = os.environ.get("RTJ_VERSITYGW"), cache_folder()
    found = [Path(named)] if named else sorted(cache.glob("bin/*/versitygw"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ServerError(f"no versitygw below {cache}/bin: build it with `make cluster-build`")
    return str(found[-1])

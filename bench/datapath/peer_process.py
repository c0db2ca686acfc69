"""The process of `package_peers.py`, asked from the benchmark and from its ranks."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from datapath.raw import Bucket


class PackagePeers:
    """Peers whose packages have an environment of their own, in a process of it (`package_peers.py`)."""

    SAVES = ("s3torchconnector", "DCP and s3fs", "torchsnapshot")
    LOADS = ("s3torchconnector",)
    PYTHON = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"

    def __init__(self, store: Bucket, *, size: int, tensors: int) -> None:
        """`size` bytes in so many tensors. Raises RuntimeError when the environment is missing."""
        if not self.PYTHON.exists():
            raise RuntimeError(f"{self.PYTHON} is missing: run `hack/setup.sh environment peers`")
        given = {
            "AWS_ENDPOINT_URL": store.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "OMP_NUM_THREADS": "1",
        }
        task = {"BENCH_PEER": json.dumps({"bytes": size, "tensors": tensors})}
        self._process = subprocess.Popen(
            [str(self.PYTHON), "-W", "ignore", str(Path(__file__).with_name("package_peers.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | store.environment | given | task,
        )
        self._paths = (f"{store.url}-of-packages/{os.getpid()}-{n}" for n in itertools.count())
        self._saved: dict[str, str] = {}
        self._answer("its start")

    def save_seconds(self, name: str) -> float:
        """Of one save to a new place in the store."""
        self._saved[name] = next(self._paths)
        return self._ask("save", name)

    def load_seconds(self, name: str) -> float:
        """Of one load of what was saved last."""
        return self._ask("load", name)

    def _ask(self, act: str, name: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{act}\t{name}\t{self._saved[name]}\n")
        self._process.stdin.flush()
        return float(self._answer(f"{act} of {name}")["seconds"])

    def _answer(self, what: str) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"package_peers.py ended with {self._process.wait(10)} at {what}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

"""The operator's process ends when it is told to, whatever its threads wait for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from rtj_operator.main import main

ThreadPoolExecutor().submit(threading.Event().wait)  # a store that never answers
main(["--kubeconfig", sys.argv[1], "--metrics-port", "0"])
"""


def test_sigterm_ends_the_process_though_a_store_never_answers(tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    command = [sys.executable, "-c", SCRIPT, str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ}) as process:
        try:
            assert process.stderr is not None
            assert "waiting until ResumableTrainingJobs can be listed" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()

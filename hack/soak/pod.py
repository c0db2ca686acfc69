"""A pod of a schedule: a volume, a plan file, and a real sidecar that may be killed and started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hack.soak.processes import Process
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar import fault, logs
from trainer_sidecar.sidecar.config import Config
from trainer_sidecar.sidecar.sidecar import Sidecar
from trainer_sidecar.store.base import Store

SILENCE_SECONDS = 1.0


class Pod:
    """One pod of one placement. `store` is handed to the forked sidecar and must not have been used before."""

    def __init__(self, root: Path, index: int, port: int, keys: RunKeys, store: Store) -> None:
        self.index, self.port, self._keys, self._store = index, port, keys, store
        self.volume = Volume(root / "volume")
        self.volume.root.mkdir(parents=True)
        self._root = root
        self.plan_file = root / "plan.json"
        self.sidecar: Process | None = None

    def start(self, crash: str = "") -> None:
        """Start the sidecar; `crash` is where it kills itself."""
        config = Config(
            volume=self.volume,
            plan_file=self.plan_file,
            pod_index=self.index,
            pod_name=f"pod-{self.index}",
            status_host="127.0.0.1",
            status_port=self.port,
            keys=self._keys,
            store_url=self._store.url,
            store_endpoint=None,
            store_region=None,
            threads=2,
            silence=SILENCE_SECONDS,
        )

        def run() -> None:
            os.environ[fault.ENV_FAULT] = crash
            logs.setup(config.pod_name)
            Sidecar(config, lambda: fault.wrap(self._store, self._keys)).start()
            signal.pause()

        self.sidecar = Process(run, self._root / "sidecar.log")

    def write_plan(self, plan: Plan) -> None:
        """By rename, as a downwardAPI volume and `rtj run` do."""
        temporary = self.plan_file.with_suffix(".tmp")
        temporary.write_text(plan.to_json())
        temporary.replace(self.plan_file)

    def alive(self) -> bool:
        return self.sidecar is not None and self.sidecar.alive()

    def kill(self) -> bool:
        """SIGKILL to the sidecar; whether it was alive."""
        return self.sidecar is not None and self.sidecar.kill()

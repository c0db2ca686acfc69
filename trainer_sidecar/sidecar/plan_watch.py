"""The plan file, watched: the one source of the epoch (operator.md O1).

A downwardAPI volume swaps a link, `rtj run` renames a file: both show as another stat. Polling by stat costs 20 calls a
second and works on every file system. What cannot be read as a plan for this run is reported and changes nothing.
"""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import Plan

log = logging.getLogger(__name__)

MAX_PLAN_BYTES = 1024 * 1024


class PlanWatch:
    """Newest valid plan. `on_change(plan)` runs in the watching thread, for each new epoch or order."""

    def __init__(self, path: Path, keys: RunKeys, on_change: Callable[[Plan], None]) -> None:
        self._path, self._keys, self._on_change = path, keys, on_change
        self._seen: tuple[int, int, int] | None = None
        self._lock = threading.Lock()
        self.plan: Plan | None = None
        self.error = ""
        """Why the file's content is not used, for people; empty when it is fine or absent."""

    @property
    def epoch(self) -> int:
        """Epoch of the plan in force; 0 before there is one."""
        return self.plan.epoch if self.plan else 0

    def poll(self) -> None:
        """Look at the file once; cheap when it has not changed."""
        with self._lock:
            try:
                info = os.stat(self._path)
            except OSError:
                return
            seen = (info.st_mtime_ns, info.st_ino, info.st_size)
            if seen == self._seen:
                return
            self._seen = seen
            self._take()

    def _take(self) -> None:
        try:
            with self._path.open("rb") as source:
                data = source.read(MAX_PLAN_BYTES + 1)
            plan = self._checked(data) if data.strip() else None
        except (OSError, ValueError) as exc:
            self._refuse(f"the plan file {self._path} is not used: {_short(exc)}")
            return
        self.error = ""
        if plan is None or plan == self.plan:
            return
        if self.plan is not None and plan.epoch < self.plan.epoch:
            self._refuse(
                f"the plan file names epoch {plan.epoch}, older than epoch {self.plan.epoch} seen before"
            )
            return
        log.info("plan seen", extra={"epoch": plan.epoch, "attempt": plan.attempt, "order": plan.order.value})
        before, self.plan = self.plan, plan
        try:
            self._on_change(plan)
        except BaseException:
            self.plan, self._seen = before, None  # look again: a plan is either served or not seen
            raise

    def _checked(self, data: bytes) -> Plan:
        if len(data) > MAX_PLAN_BYTES:
            raise ValueError(f"it is larger than {MAX_PLAN_BYTES} bytes")
        plan = Plan.model_validate_json(data)
        if plan.contract_version != CONTRACT_VERSION:
            raise ValueError(
                f"it has contract version {plan.contract_version}, this sidecar has {CONTRACT_VERSION}: "
                "use operator and sidecar of the same release"
            )
        if (plan.namespace, plan.run_id) != (self._keys.namespace, self._keys.run_id):
            raise ValueError(
                f"it is for run {plan.namespace}/{plan.run_id}, this sidecar serves "
                f"{self._keys.namespace}/{self._keys.run_id}"
            )
        return plan

    def _refuse(self, reason: str) -> None:
        if reason != self.error:
            log.warning("plan refused", extra={"reason": reason})
        self.error = reason


def _short(exc: Exception) -> str:
    if isinstance(exc, ValidationError):
        first = exc.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg']}"
    return str(exc)

"""Telling the sidecar that a rank's part is sealed, also right after a save that this rank gave up.

Such a save has ended for the rank at once. For the sidecar it has not, where another rank has sealed its part: it takes
one save at a time, and refuses the next one until it has let that one go.
"""

from __future__ import annotations

import time

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.train.errors import SidecarRefused
from trainer_sidecar.train.sidecar_client import SidecarClient

_POLL_SECONDS = 0.005
_LETS_GO_SECONDS = 5.0


def tell_sealed(client: SidecarClient, message: m.Sealed, failed: str, deadline: float) -> None:
    """`failed`: id of the newest save that failed, or empty; waited for until `deadline` (monotonic) where it is in the
    way, and told again. Raises SidecarRefused."""
    while True:
        try:
            return client.tell(message)
        except SidecarRefused:
            if not failed or time.monotonic() > deadline:
                raise
            if client.ask(m.AskSave(save_id=failed), m.SaveReply).outcome is not SaveOutcome.IN_FLIGHT:
                # Its outcome can be seen before it is let go, and one before it may still be in the way.
                deadline = min(deadline, time.monotonic() + _LETS_GO_SECONDS)
            time.sleep(_POLL_SECONDS)

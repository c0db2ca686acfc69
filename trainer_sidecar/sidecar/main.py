"""Entry point `rtj-sidecar`: settings, logs, signals.

SIGTERM comes to a native sidecar after the trainer has ended, within the same grace period (operator.md O7): what is
sealed is uploaded and committed first, then the process ends. A second one ends it at once.
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence

from trainer_sidecar.sidecar import fault, logs
from trainer_sidecar.sidecar.config import Config, parse_config
from trainer_sidecar.store.base import Store

log = logging.getLogger(__name__)

EXIT_USAGE = 64
EXIT_START = 69
_ENDING = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM. 0 after a clean drain, 64 for bad settings, 69 when volume or port cannot be had."""
    started = time.monotonic()
    try:
        config = parse_config(argv)
        fault.arm(config)
    except ValueError as exc:
        print(f"rtj-sidecar: {exc}", file=sys.stderr)
        return EXIT_USAGE
    logs.setup(config.pod_name)
    # Blocked everywhere and waited for: a handler runs in the main thread only, and a signal that the kernel hands to
    # another thread would not wake that one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

    from trainer_sidecar.sidecar.sidecar import Sidecar

    try:
        sidecar = Sidecar(config, lambda: _open_store(config))
        sidecar.start()
    except OSError as exc:
        log.error("the sidecar cannot start", extra={"reason": str(exc)})
        return EXIT_START
    log.info("sidecar up", extra={"port": sidecar.http.port, "seconds": round(time.monotonic() - started, 3)})
    signal.sigwait(_ENDING)
    log.info("finishing what is sealed, then ending")
    drained = threading.Thread(target=sidecar.drain, daemon=True)
    drained.start()
    while drained.is_alive() and signal.sigtimedwait(_ENDING, 0) is None:
        drained.join(0.1)
    log.info("sidecar down", extra={"drained": not drained.is_alive()})
    return 0


def _open_store(config: Config) -> Store:
    from trainer_sidecar.store.open import open_store

    return fault.wrap(
        open_store(config.store_url, endpoint=config.store_endpoint, region=config.store_region), config.keys
    )

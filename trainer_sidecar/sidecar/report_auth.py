"""Who may speak for a pod: an HMAC-SHA256 over the body of `POST /report` and of its reply, keyed with the nonce of the
attempt that the plan is for.

What it protects: the port is open to the whole pod network, where a lie would abort every save, keep a lost pod looking
alive, or (as a reply from an address that another job's pod has taken over) free buffers whose save never committed.
Somebody who only reaches the port cannot do that, and a report signed for one epoch says nothing in another.

What it does not protect: the nonce is no secret like the store's credentials. It stands in the plan, which is an
annotation of each pod and a file in each trainer, and in the journal. Whoever may read pods of the namespace, the run's
own code, and readers of the bucket can sign for any pod of the run. Reports travel in plain HTTP: who reads the network
can replay one within its epoch; it repeats what was true, and can hide for a while that a pod is lost. Network policies
close these. Beneath it all, no commit rests on a report: the coordinator reads every part in the store.
"""

import hashlib
import hmac
import threading

from trainer_sidecar.contract.plan import Plan

SIGNATURE_HEADER = "X-RTJ-Signature"
"""`sha256=<64 hex digits>`."""
KEPT_EPOCHS = 8
"""Epochs whose pods are still told that there is a newer one: a peer may see its plan later than the coordinator."""

_REPORT, _REPLY = b"rtj report\n", b"rtj reply\n"


def sign_report(nonce: str, body: bytes) -> str:
    """Value of `SIGNATURE_HEADER` for a report."""
    return _sign(nonce, _REPORT, body)


def sign_reply(nonce: str, body: bytes) -> str:
    """Value of `SIGNATURE_HEADER` for the reply; never equal to that of a report with the same bytes."""
    return _sign(nonce, _REPLY, body)


def is_reply_of(nonce: str, body: bytes, signature: str) -> bool:
    """Whether the reply comes from somebody who has our plan."""
    return _same(sign_reply(nonce, body), signature)


class ReportKeys:
    """Nonces of the epochs that this sidecar has served. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nonces: dict[int, str] = {}

    def begin(self, plan: Plan) -> None:
        """Take reports of the plan's epoch from now on."""
        with self._lock:
            self._nonces[plan.epoch] = plan.nonce
            for epoch in sorted(self._nonces)[:-KEPT_EPOCHS]:
                del self._nonces[epoch]

    def epoch_of(self, body: bytes, signature: str) -> int | None:
        """The epoch whose plan the sender of a report has; None for a stranger, and before the first plan."""
        with self._lock:
            nonces = dict(self._nonces)
        return next((e for e, nonce in nonces.items() if _same(sign_report(nonce, body), signature)), None)

    def reply_signature(self, epoch: int, body: bytes) -> str:
        """For the reply to a report that `epoch_of` found to be of `epoch`."""
        with self._lock:
            nonce = self._nonces.get(epoch, "")
        return sign_reply(nonce, body)


def _sign(nonce: str, what: bytes, body: bytes) -> str:
    return f"sha256={hmac.new(nonce.encode(), what + body, hashlib.sha256).hexdigest()}"


def _same(ours: str, theirs: str) -> bool:
    return hmac.compare_digest(ours.encode(), theirs.encode("utf-8", "replace"))

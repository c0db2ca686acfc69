"""Failures of the API server that last: what a job's status says of them.

A failing admission webhook (Kueue's, whose controller is down) is said at once, since it ends by somebody's hand. Other
answers of 5xx, and none at all, are said once they have lasted: a leader election of etcd is nobody's business. 429 and
503 are not said: who has no time for a request has none for a status either.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rtj_operator.conditions import Reason
from rtj_operator.kube import Busy, KubeError, NoAnswer, WebhookFailed
from rtj_operator.queue import Key

LASTS_SECONDS = 20.0
"""How long requests of one job must have failed before that is said."""
_NAME = re.compile(r'webhook "([^"]{1,253})"')
_SERVICE = re.compile(r"https?://[^./:\s]+\.([^./:\s]+)\.svc\b")
_TRIED = "It is tried again by itself, and ranks that train go on"


@dataclass
class ApiFailures:
    """Since when each job's requests fail. One instance per process."""

    clock: Callable[[], float] = time.monotonic
    _since: dict[Key, float] = field(default_factory=dict)

    def said_of(self, key: Key, exc: KubeError) -> tuple[Reason, str] | None:
        """Reason and sentence for the job's status; None: nothing is to be said (yet)."""
        if isinstance(exc, WebhookFailed):
            return Reason.WEBHOOK_FAILING, webhook_sentence(exc.sentence)
        if isinstance(exc, Busy) or not (isinstance(exc, NoAnswer) or exc.status >= 500):
            return None
        if self.clock() - self._since.setdefault(key, self.clock()) < LASTS_SECONDS:
            return None
        text = (
            f"the API server fails at a request that this job needs: {exc}. Look at the logs of kube-apiserver and "
            f"etcd. {_TRIED}"
        )
        return Reason.API_SERVER_FAILING, text

    def over(self, key: Key) -> None:
        """A look at the job came to its end."""
        self._since.pop(key, None)


def webhook_sentence(sentence: str) -> str:
    """Which webhook is in the way, what the API server said of it, and what to look at."""
    found = _NAME.search(sentence)
    name = found[1] if found else "that is named here"
    served = _SERVICE.search(sentence)
    where = f": kubectl get pods -n {served[1]}" if served else ""
    return (
        f"admission webhook {name} does not answer, and without it the API server takes no Job or pod: {sentence}. "
        f"See that what serves it runs{where}; kubectl get mutatingwebhookconfigurations,"
        f"validatingwebhookconfigurations shows which it is. {_TRIED}"
    )

"""Store credentials from a job's Secret, checked where a mistake can still be named: the store only says "denied"."""

import base64
import binascii
import logging
from dataclasses import dataclass, field

from rtj_operator.kube import SECRETS, Forbidden, Kube, NotFound, Object
from rtj_operator.rights import missing_right

log = logging.getLogger(__name__)

KEY_ID = "AWS_ACCESS_KEY_ID"
CREDENTIALS = (KEY_ID, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class BadSecret(Exception):
    """A key of the Secret cannot be a credential. The message names Secret and key, never the value."""


@dataclass(frozen=True)
class Credentials:
    """By name of their variable; none: the operator's own, and `missing` says why."""

    values: dict[str, str] = field(default_factory=dict, repr=False)
    missing: str = ""


async def read_credentials(kube: Kube, namespace: str, name: str) -> Credentials:
    """The store's credentials from that Secret, if it exists and may be read. Raises BadSecret, Unavailable."""
    try:
        secret = await kube.get(SECRETS, namespace, name)
    except NotFound:
        return Credentials(missing=f"there is no Secret {namespace}/{name}")
    except Forbidden as exc:
        log.debug("Secret %s/%s: %s", namespace, name, exc)
        return Credentials(missing=missing_right(exc) or exc.sentence)
    return Credentials(credentials_of(secret))


def credentials_of(secret: Object) -> dict[str, str]:
    """The credentials that `secret` holds, by name of their variable. Raises BadSecret."""
    data = secret.get("data") or {}
    return {key: _text(secret, key, data[key]) for key in CREDENTIALS if data.get(key)}


def _text(secret: Object, key: str, encoded: str) -> str:
    meta = secret["metadata"]
    where = f"Secret {meta['namespace']}/{meta['name']}, key {key}"
    try:
        text = base64.b64decode(encoded, validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        raise BadSecret(f"{where}: is not plain text, as credentials are: make it anew") from None
    if text != text.strip():
        raise BadSecret(
            f"{where}: begins or ends with a space or a line end, as `echo` writes one: make it with "
            "kubectl create secret generic --from-literal, or from a file made with printf"
        )
    if not text.isprintable():
        raise BadSecret(f"{where}: holds a control character or a line end: make it anew")
    return text

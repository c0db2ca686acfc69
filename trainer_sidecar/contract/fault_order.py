"""Fault orders: which fault point fires how often in which pod of a drill, and the signature without which none does.

An order is data, never code: the name of a point from a fixed list, and numbers with bounds. Whoever holds the key
that the chart made signs orders for one object by name, until a moment; the operator checks that and hands them to
the sidecars of the object's first placement, in the environment.
"""

import hashlib
import hmac
import json
from typing import Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from trainer_sidecar.contract import API_GROUP
from trainer_sidecar.contract.base import Document

FAULT_ANNOTATION = f"{API_GROUP}/fault-orders"
"""On a ResumableTrainingJob: a `SignedOrders`."""
SIGNATURE_ANNOTATION = f"{API_GROUP}/fault-signature"
"""On a ResumeDrill: a `Signature` of its `spec.faults`, for its sandbox."""
FIRED_ANNOTATION = f"{API_GROUP}/faults-fired"
"""On the same object: how often each of the operator's points was fatal."""
FAULT_LABEL = f"{API_GROUP}/fault-injection"
FAULT_LABEL_VALUE = "enabled"
"""On the namespace: its owner agrees to faults in it."""
ENV_FAULT_ORDERS = "RTJ_FAULT_ORDERS"
"""For the sidecar: a JSON list of `FaultOrder`."""
FIRED = "fault fired"
"""Message of the line in the sidecar's log: a drill's proof."""
LEAST_KEY_BYTES = 16
MOST_ORDERS = 16
MOST_BYTES = 8192
"""Of the annotation: what is longer is not read."""
MOST_AHEAD_SECONDS = 3600
"""Orders that hold for longer are refused. Until they expire, whoever may write the object can have them again, by
making it anew under its name."""

SavePoint = Literal[
    "after-hash",
    "after-part-made",
    "after-shard-put",
    "before-manifest",
    "after-manifest-file",
    "before-claim",
    "after-claim",
    "before-latest",
]
"""Around the writes of a save, in order, in the sidecar."""
DeletePoint = Literal["before-delete", "after-delete"]
"""Around a batch of deletions of retention or a sweep."""
StorePoint = Literal["store-read", "store-write"]
"""Any request of a sidecar that reads (get, head, list), or that writes (create, put); probes of the store apart."""
RankPoint = Literal["rank-restores", "rank-restored", "rank-steps", "rank-seals"]
"""In the training library of any rank of the pod, when it tells its sidecar: that it opens the restore point, that it
has loaded all, that it has made a step (a few times a second at most), that its part of a save is complete."""
OperatorPoint = Literal["after-status-write", "after-job-create", "after-attempt-entry"]
"""Around what the operator does for the job."""
SAVE_POINTS: tuple[str, ...] = get_args(SavePoint)
DELETE_POINTS: tuple[str, ...] = get_args(DeletePoint)
RANK_POINTS: tuple[str, ...] = get_args(RankPoint)
OPERATOR_POINTS: tuple[str, ...] = get_args(OperatorPoint)


class FaultOrder(Document):
    """At the passings `after` + 1 to `after` + `times` of `point` in pod `pod`, the fault happens.

    A store point fails the request, or delays it by `seconds`; a rank's point kills that rank, or freezes its whole
    process for `seconds`; every other point does so to the sidecar. An operator's point kills the operator, whatever
    pod, `after` and `seconds` say.
    """

    model_config = ConfigDict(extra="forbid")

    point: SavePoint | DeletePoint | StorePoint | RankPoint | OperatorPoint
    pod: int = Field(default=0, ge=0, le=4095)
    after: int = Field(default=0, ge=0, le=1_000_000)
    times: int = Field(default=1, ge=1, le=1000)
    seconds: float = Field(default=0, ge=0, le=100, allow_inf_nan=False)
    """Less than what the sidecar's liveness probe takes to end a frozen one (120 s)."""


class Signature(Document):
    """Who may ask for orders has asked for these, until then."""

    model_config = ConfigDict(extra="forbid")

    expires: int
    """Unix seconds; the operator hands nothing out later, nor more than `MOST_AHEAD_SECONDS` before."""
    signature: str
    """HMAC-SHA256, hex, over object, expiry and orders."""


class SignedOrders(Signature):
    """What the annotation of a job holds."""

    orders: tuple[FaultOrder, ...] = Field(min_length=1, max_length=MOST_ORDERS)


class OrdersRefusedError(ValueError):
    """Orders that must not be carried out; the message says what is missing."""


_ORDERS: TypeAdapter[tuple[FaultOrder, ...]] = TypeAdapter(tuple[FaultOrder, ...])


def sign(key: bytes, namespace: str, name: str, orders: tuple[FaultOrder, ...], expires: int) -> str:
    """The text of the annotation for that object."""
    signed = signature_of(key, namespace, name, orders, expires)
    return SignedOrders(orders=orders, expires=expires, signature=signed.signature).to_json()


def signature_of(
    key: bytes, namespace: str, name: str, orders: tuple[FaultOrder, ...], expires: int
) -> Signature:
    """For orders that stand elsewhere."""
    return Signature(expires=expires, signature=_digest(key, namespace, name, orders, expires))


def joined(orders: tuple[FaultOrder, ...], signature: str) -> str:
    """The text of a job's annotation for orders and the text of their `Signature`; one that no key has made, where that
    text is none."""
    try:
        found = Signature.model_validate_json(signature[:MOST_BYTES])
    except ValidationError:
        found = Signature(expires=0, signature="")
    return SignedOrders(orders=orders, expires=found.expires, signature=found.signature).to_json()


def check(key: bytes, namespace: str, name: str, text: str, now: float) -> tuple[FaultOrder, ...]:
    """The orders of an annotation, if they were signed for this object and hold still. Raises OrdersRefusedError."""
    if len(text) > MOST_BYTES:
        raise OrdersRefusedError(f"they have {len(text)} characters, at most {MOST_BYTES} are read")
    try:
        signed = SignedOrders.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        raise OrdersRefusedError(
            f"they are none: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from exc
    wanted = _digest(key, namespace, name, signed.orders, signed.expires)
    if not hmac.compare_digest(wanted.encode(), signed.signature.encode()):
        raise OrdersRefusedError(f"they are not signed with this installation's key for {namespace}/{name}")
    if now >= signed.expires:
        raise OrdersRefusedError(f"they expired {now - signed.expires:.0f} s ago: sign them again")
    if signed.expires > now + MOST_AHEAD_SECONDS:
        raise OrdersRefusedError(
            f"they hold for another {signed.expires - now:.0f} s, at most {MOST_AHEAD_SECONDS} are accepted: sign them "
            "for less"
        )
    return signed.orders


def as_text(orders: tuple[FaultOrder, ...]) -> str:
    """For `ENV_FAULT_ORDERS`."""
    return _ORDERS.dump_json(orders, by_alias=True).decode()


def from_text(text: str) -> tuple[FaultOrder, ...]:
    """Orders of `ENV_FAULT_ORDERS`; none for an empty text. Raises ValueError."""
    return _ORDERS.validate_json(text) if text else ()


def _digest(key: bytes, namespace: str, name: str, orders: tuple[FaultOrder, ...], expires: int) -> str:
    said = json.dumps([namespace, name, expires, as_text(orders)]).encode()
    return hmac.new(key, said, hashlib.sha256).hexdigest()
